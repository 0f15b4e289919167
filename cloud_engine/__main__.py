"""Command line of the cloud engine: `python -m cloud_engine serve --model NAME --uds PATH`."""

import argparse
import sys
from collections.abc import Sequence

from engine_core.batch_engine import BatchEngine
from engine_core.batch_model import BatchModel
from engine_core.byte_sizes import parse_bytes
from engine_core.ladder import DEFAULT_LADDER, Ladder
from engine_core.models import ModelFiles, ModelStore
from engine_core.process import (
    add_serve_arguments,
    begin,
    from_text,
    positive,
    run_command,
    run_engine,
)
from engine_core.tokenizer import Tokenizer

_DEVICES = ("auto", "cpu", "cuda")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_WEIGHTS = ("auto", "int8", "int8-all")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cloud_engine", description=__doc__)
    serve = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "serve", help="answer OpenAI requests with a PyTorch model"
    )
    add_serve_arguments(serve)
    serve.add_argument(
        "--device", choices=_DEVICES, default="auto", help="auto: the GPU if there is one"
    )
    serve.add_argument(
        "--dtype", choices=_DTYPES, default="auto", help="auto: bfloat16 on a GPU, else float32"
    )
    serve.add_argument(
        "--weights",
        choices=_WEIGHTS,
        default="auto",
        help="auto: as --dtype; int8: those of the layers; int8-all: embeddings and head as well",
    )
    serve.add_argument(
        "--max-running",
        type=positive,
        metavar="SEQUENCES",
        help="sequences side by side (default: 64 on a GPU, 8 on a CPU)",
    )
    serve.add_argument(
        "--kv-memory",
        type=from_text(parse_bytes),
        metavar="SIZE",
        help="most memory for keys and values, e.g. 8GiB (default: what is left of a GPU, "
        "a quarter of what there is on a CPU)",
    )
    serve.add_argument(
        "--graphs",
        choices=("auto", "off"),
        default="auto",
        help="auto: CUDA Graphs on a GPU; off: every step is launched kernel by kernel",
    )
    serve.add_argument(
        "--ladder",
        type=from_text(Ladder.from_text),
        default=DEFAULT_LADDER,
        metavar="RUNGS",
        help="share of --max-running that runs below which use of the GPU by others; above all "
        "of them one sequence at a time (default: 60%%:100%%, 80%%:50%%)",
    )
    args = parser.parse_args(arguments)
    return run_command(lambda: _serve(args))


def _serve(args: argparse.Namespace) -> int:
    begin(args)
    store = ModelStore()
    files = store.pull(args.model)
    engine = BatchEngine(
        model=files.label,
        load=lambda: _load(files, store, args),
        tokenizer=Tokenizer.load(files),
        max_waiting=args.max_waiting,
    )
    return run_engine(engine, args)


def _load(files: ModelFiles, store: ModelStore, args: argparse.Namespace) -> BatchModel:
    # Here, since torch and transformers take seconds to import: in the engine's thread, in which
    # torch's thread count is also set, and only once the model's files are known to be good.
    import torch  # noqa: PLC0415

    from cloud_engine.device import pick_device, pick_dtype  # noqa: PLC0415
    from cloud_engine.open_model import open_model  # noqa: PLC0415
    from cloud_engine.runner import RunnerOptions  # noqa: PLC0415

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    options = RunnerOptions(
        context=args.context,
        max_running=args.max_running,
        kv_memory=args.kv_memory,
        graphs=args.graphs == "auto",
        ladder=args.ladder,
    )
    return open_model(
        files, store, device=device, dtype=dtype, weights=args.weights, options=options
    )


if __name__ == "__main__":
    sys.exit(main())
