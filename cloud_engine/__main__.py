"""Command line of the cloud engine: `python -m cloud_engine serve --model NAME --uds PATH`."""

import argparse
import sys
from collections.abc import Sequence

from engine_core.batch_engine import BatchEngine
from engine_core.batch_model import BatchModel
from engine_core.models import ModelFiles, ModelStore
from engine_core.process import add_serve_arguments, begin, run_command, run_engine
from engine_core.single_sequence import SingleSequenceModel
from engine_core.tokenizer import Tokenizer

_DEVICES = ("auto", "cpu", "cuda")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


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
    from cloud_engine.load import load_causal_lm  # noqa: PLC0415
    from cloud_engine.torch_model import TorchModel  # noqa: PLC0415

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    model = load_causal_lm(files, store, device=device, dtype=dtype)
    return SingleSequenceModel(TorchModel(model, args.context))


if __name__ == "__main__":
    sys.exit(main())
