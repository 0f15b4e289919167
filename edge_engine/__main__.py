"""`python -m edge_engine serve | build`: the edge engine's process."""

import argparse
import functools
import os
import sys

from edge_engine.build import ensure_build, find_build
from edge_engine.open_model import open_model
from engine_core import lifeline
from engine_core.batch_engine import BatchEngine
from engine_core.memory_size import STEP_LEAST, MemorySize
from engine_core.models import ModelStore
from engine_core.process import (
    add_serve_arguments,
    begin,
    from_text,
    positive,
    run_command,
    run_engine,
)
from engine_core.tokenizer import Tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edge_engine")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model; fetch and build it if need be")
    add_serve_arguments(serve)
    serve.add_argument(
        "--slots",
        type=positive,
        metavar="SEQUENCES",
        help="sequences side by side (default: as many as fit --kv-memory, up to 8)",
    )
    serve.add_argument(
        "--kv-memory",
        type=_memory_size,
        metavar="SIZE",
        help="most memory for keys and values, e.g. 768MiB (default: a quarter of what there is)",
    )
    _add_kv(serve)
    serve.add_argument(
        "--step-memory",
        type=functools.partial(_memory_size, least=STEP_LEAST),
        metavar="SIZE",
        help="most working memory of a step (default: a twentieth of what there is)",
    )
    serve.set_defaults(run=_serve)
    build = commands.add_parser("build", help="fetch a model and build its graph")
    build.add_argument("--model", required=True, help="name of the model to build")
    build.add_argument(
        "--precision",
        choices=("int8", "fp32"),
        default="int8",
        help="int8 to serve; fp32 to compare with (default: %(default)s)",
    )
    _add_kv(build)
    build.add_argument("--lifeline", action="store_true", help="end when stdin reaches end-of-file")
    build.set_defaults(run=_build)
    args = parser.parse_args(arguments)
    return run_command(lambda: int(args.run(args)))


def _serve(args: argparse.Namespace) -> int:
    begin(args)
    store = ModelStore()
    files = store.pull(args.model)
    build = find_build(store, files, kv=args.kv)
    if build is None:
        ensure_build(store, files, kv=args.kv)
        # A build leaves a large, fragmented heap; the engine should run for weeks in a small one.
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - no shell, our own command line
    engine = BatchEngine(
        model=files.label,
        load=functools.partial(
            open_model,
            build,
            context=args.context,
            slots=args.slots,
            kv_memory=args.kv_memory,
            step_memory=args.step_memory,
            threads=args.threads,
        ),
        tokenizer=Tokenizer.load(files),
        max_waiting=args.max_waiting,
    )
    return run_engine(engine, args)


def _build(args: argparse.Namespace) -> int:
    if args.lifeline:
        lifeline.start()
    store = ModelStore()
    build = ensure_build(store, store.pull(args.model), args.precision, args.kv)
    sys.stdout.write(f"{build.folder}\n")
    return 0


def _add_kv(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--kv",
        choices=("float32", "int8"),
        default="float32",
        help="what keys and values are kept in; int8 takes a quarter of the memory "
        "(default: %(default)s)",
    )


def _memory_size(text: str, *, least: int = 0) -> int:
    """Parse an amount of memory into bytes, for argparse."""
    size = from_text(MemorySize.from_text)(text)
    if fault := size.fault(least=least):
        raise argparse.ArgumentTypeError(fault)
    return size.bytes


if __name__ == "__main__":
    sys.exit(main())
