"""How exact the edge engine's graphs of the built-in model are.

Three comparisons on the same text: the emitted float32 graph against torch, and the INT8 graph
against the float32 graph by perplexity, greedy choice and Kullback-Leibler divergence.

    python benchmarks/edge_accuracy.py [--text FILE] [--window 512]

Prints a table and, last, one JSON line.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from edge_engine.build import ensure_build
from edge_engine.kv_budget import KvBudget
from edge_engine.manifest import Precision
from edge_engine.runner import Runner
from engine_core.models import BUILTIN, ModelFiles, ModelStore
from engine_core.tokenizer import Tokenizer

TEXT = Path(__file__).parent / "data" / "prose.txt"
PARITY_TOKENS = 512


def windows(ids: list[int], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield inputs and the tokens that follow each of them."""
    for begin in range(0, len(ids) - 1, size):
        chunk = ids[begin : begin + size + 1]
        yield chunk[:-1], chunk[1:]


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the log-softmax of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    normalised: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalised


def opened(store: ModelStore, files: ModelFiles, precision: Precision, window: int) -> Runner:
    """Return the graph in one precision, with room for a window."""
    budget = KvBudget(memory=2**30, limit=2**30, context=window, slots=1)
    return Runner(ensure_build(store, files, precision), budget)


def parity(files: ModelFiles, model: Runner, ids: list[int]) -> float:
    """Return the largest difference between any logit of a graph and of torch."""
    torch_model = AutoModelForCausalLM.from_pretrained(
        files.path.parent, gguf_file=files.path.name, dtype=torch.float32
    )
    with torch.no_grad():
        wanted = torch_model.eval()(torch.tensor([ids])).logits[0].numpy()
    return float(np.abs(model.all_logits(ids) - wanted).max())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text, at least 4k tokens")
    parser.add_argument("--window", type=int, default=512, help="tokens of context (512)")
    args = parser.parse_args()

    store = ModelStore()
    files = store.pull(BUILTIN)
    ids = Tokenizer.load(files).encode(args.text.read_text("utf-8"))
    exact = opened(store, files, "fp32", args.window)
    small = opened(store, files, "int8", args.window)
    parity_max_abs = parity(files, exact, ids[: min(PARITY_TOKENS, args.window)])

    loss = {"fp32": 0.0, "int8": 0.0}
    seconds = {"fp32": 0.0, "int8": 0.0}
    divergence, agreed, tokens = 0.0, 0, 0
    for inputs, following in windows(ids, args.window):
        found = {}
        for name, model in (("fp32", exact), ("int8", small)):
            begin = time.perf_counter()
            found[name] = log_probabilities(model.all_logits(inputs))
            seconds[name] += time.perf_counter() - begin
            loss[name] -= float(found[name][np.arange(len(following)), following].sum())
        wanted, got = found["fp32"], found["int8"]
        divergence += float((np.exp(wanted) * (wanted - got)).sum())
        agreed += int((wanted.argmax(axis=1) == got.argmax(axis=1)).sum())
        tokens += len(inputs)
        print(f"\r{tokens} of {len(ids) - 1} tokens", end="", file=sys.stderr)
    print(file=sys.stderr)

    perplexity = {name: float(np.exp(total / tokens)) for name, total in loss.items()}
    print(f"{files.label}, {tokens} tokens of {args.text.name}, windows of {args.window}\n")
    print(f"{'graph':<8} {'perplexity':>12} {'tokens/s':>10}")
    for name, value in perplexity.items():
        print(f"{name:<8} {value:>12.4f} {tokens / seconds[name]:>10.0f}")
    print(f"\nfp32 graph against torch, largest difference of a logit: {parity_max_abs:.2e}")
    print(f"int8 against fp32: same greedy choice {agreed / tokens:.2%}, ", end="")
    print(f"mean KL divergence {divergence / tokens:.5f}\n")
    result = {
        "parity_max_abs": parity_max_abs,
        "ppl_ratio": perplexity["int8"] / perplexity["fp32"],
        "top1_agreement": agreed / tokens,
        "tokens": tokens,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
