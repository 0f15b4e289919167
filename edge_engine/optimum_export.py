"""Export a decoder that the emitter does not know, through optimum, in a process of its own.

`python -m edge_engine.optimum_export MODEL_FOLDER TARGET_FOLDER --precision int8`

The only module here that imports torch, and only when it runs as that process. Needs the extra
`export`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import onnx

from edge_engine.manifest import DATA_FILE, GRAPH_FILE
from edge_engine.quantize_graph import quantize_graph
from engine_core import lifeline


def export(model: Path, target: Path, *, quantize: bool) -> None:
    """Write `model.onnx` and its data file into `target`.

    Args:
        model: A local folder with `config.json`, safetensors and a tokenizer.
        target: An existing folder.
        quantize: Turn linear layers into 8-bit blocks; else everything stays float32.
    """
    from optimum.exporters.onnx import main_export  # noqa: PLC0415 - imports torch

    # Inside the target, so that whoever clears that away after a crash takes this along.
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        main_export(
            str(model),
            scratch,
            task="text-generation-with-past",
            dtype="fp32",
            local_files_only=True,
            # Its own comparison with torch needs a second copy of the model in memory; the build
            # checks the result by running it.
            do_validation=False,
        )
        graph = onnx.load(str(Path(scratch) / GRAPH_FILE))
    if quantize:
        quantize_graph(graph)
    onnx.save_model(
        graph,
        str(target / GRAPH_FILE),
        save_as_external_data=True,
        location=DATA_FILE,
        size_threshold=1024,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edge_engine.optimum_export")
    parser.add_argument("model", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--precision", choices=("int8", "fp32"), required=True)
    args = parser.parse_args(arguments)
    lifeline.start()
    export(args.model, args.target, quantize=args.precision == "int8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
