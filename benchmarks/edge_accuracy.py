"""How exact the edge engine's graphs of the built-in model are.

Comparisons on the same text: the emitted float32 graph against torch, and the INT8 graph, with keys
and values in float32 and in int8, against the float32 graph by perplexity, greedy choice and
Kullback-Leibler divergence. Int8 keys are always read back from the cache, those of a token's own
chunk too, so that the numbers are those of generating token by token.

    python benchmarks/edge_accuracy.py [--text FILE] [--window 512]

Prints a table and, last, one JSON line.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from edge_engine.build import ensure_build
from edge_engine.kv_budget import KvBudget
from edge_engine.manifest import KvPrecision, Precision
from edge_engine.runner import Runner
from engine_core.models import BUILTIN, ModelFiles, ModelStore
from engine_core.tokenizer import Tokenizer

TEXT = Path(__file__).parent / "data" / "prose.txt"
PARITY_TOKENS = 512
GATE = 1.01
"""How much larger perplexity may be where accuracy is traded without being asked for."""


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


@dataclass
class Measured:
    """A graph, and what its answers add up to."""

    model: Runner
    loss: float = 0.0
    divergence: float = 0.0
    agreed: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        """Of the text so far."""
        return float(np.exp(self.loss / self.tokens))

    def read(
        self, inputs: list[int], following: list[int], exact: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """Add a window to the sums; return its log-probabilities.

        Args:
            inputs: The tokens.
            following: The token after each of them.
            exact: Log-probabilities to compare with; None for these themselves.
        """
        begin = time.perf_counter()
        found = log_probabilities(self.model.all_logits(inputs, chunk=64))
        self.seconds += time.perf_counter() - begin
        wanted = found if exact is None else exact
        self.loss -= float(found[np.arange(len(following)), following].sum())
        self.divergence += float((np.exp(wanted) * (wanted - found)).sum())
        self.agreed += int((wanted.argmax(axis=1) == found.argmax(axis=1)).sum())
        self.tokens += len(inputs)
        return found


def opened(
    store: ModelStore, files: ModelFiles, window: int, precision: Precision, kv: KvPrecision
) -> Measured:
    """Return a graph with room for a window."""
    budget = KvBudget(memory=2**30, limit=2**30, context=window, slots=1)
    return Measured(Runner(ensure_build(store, files, precision, kv), budget))


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
    exact = opened(store, files, args.window, "fp32", "float32")
    small = opened(store, files, args.window, "int8", "float32")
    smallest = opened(store, files, args.window, "int8", "int8")
    graphs = {"fp32": exact, "int8": small, "int8, int8 keys and values": smallest}
    parity_max_abs = parity(files, exact.model, ids[: min(PARITY_TOKENS, args.window)])

    for inputs, following in windows(ids, args.window):
        wanted = exact.read(inputs, following, None)
        for other in (small, smallest):
            other.read(inputs, following, wanted)
        print(f"\r{exact.tokens} of {len(ids) - 1} tokens", end="", file=sys.stderr)
    print(file=sys.stderr)

    tokens = exact.tokens
    print(f"{files.label}, {tokens} tokens of {args.text.name}, windows of {args.window}\n")
    print(f"{'graph':<27} {'perplexity':>10} {'ratio':>7} {'same choice':>12}", end="")
    print(f" {'mean KL':>9} {'tokens/s':>9}")
    ratios = {name: graph.perplexity / exact.perplexity for name, graph in graphs.items()}
    for name, graph in graphs.items():
        print(f"{name:<27} {graph.perplexity:>10.4f} {ratios[name]:>7.4f}", end="")
        print(f" {graph.agreed / tokens:>12.2%} {graph.divergence / tokens:>9.5f}", end="")
        print(f" {tokens / graph.seconds:>9.0f}")
    print(f"\nfp32 graph against torch, largest difference of a logit: {parity_max_abs:.2e}")
    for name, ratio in ratios.items():
        held = "holds" if ratio <= GATE else "is missed"
        print(f"{name}: perplexity ratio at most {GATE} {held}")
    print()
    result = {
        "parity_max_abs": parity_max_abs,
        "ppl_ratio": ratios["int8"],
        "top1_agreement": small.agreed / tokens,
        "int8_kv_ppl_ratio": smallest.perplexity / exact.perplexity,
        "int8_kv_top1_agreement": smallest.agreed / tokens,
        "int8_kv_kl": smallest.divergence / tokens,
        "tokens": tokens,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
