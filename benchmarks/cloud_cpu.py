"""Is the cloud engine's path as fast as transformers' own on a CPU, and what does int8 cost?

    python benchmarks/cloud_cpu.py [--rounds 5] [--threads 2]

The built-in model in float32, as `serve` runs it and as transformers loads it: our packed stream over blocks of keys and
values, stepped by the scheduler, against `generate` with its cache; in turns, greedy, on prompts
that were not seen before. Tokens per second while all sequences generate, without the prompts.
`vs_generate` is the smallest of the cells' ratios of medians. Then the perplexity of one English
text with int8 weights against float32, with embeddings and head in int8 as well, which is the
larger loss of the two; `int8_ppl_delta` is that as a fraction. Prints tables and, last, one JSON
line.
"""

import argparse
import json
import math
import statistics
import time
from typing import Any

import torch
from corpus import TEXT, Corpus

from cloud_engine.int8 import quantize_linears
from cloud_engine.load import load_causal_lm
from cloud_engine.open_model import open_model
from cloud_engine.runner import Runner, RunnerOptions
from engine_core.models import BUILTIN, ModelFiles, ModelStore
from engine_core.scheduler import Scheduler, Sequence
from engine_core.tokenizer import Tokenizer
from engine_core.types import TokenDraw

CELLS = [(sequences, prompt) for sequences in (1, 4, 8) for prompt in (64, 512)]
CONTEXT = 640
NEW = 48
WINDOW = 512
WINDOWS = 12


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    store = ModelStore()
    files = store.pull(BUILTIN)

    ratios = _compare(files, store, args.rounds)
    text = Tokenizer.load(files).encode(TEXT.read_text("utf-8"))[: WINDOW * WINDOWS]
    deltas = {}
    exact = _perplexity(_load(files, store), text)
    print(f"\n{'weights':>10} {'perplexity':>11} {'delta':>8} {'of bfloat16 bytes':>18}")
    print(f"{'float32':>10} {exact:11.3f}")
    for name, embeddings in (("int8", False), ("int8-all", True)):
        model = _load(files, store)
        whole = _bytes_in_bfloat16(model)
        quantize_linears(model, embeddings=embeddings)
        size = _bytes_in_bfloat16(model)
        deltas[name] = _perplexity(model, text) / exact - 1
        perplexity = exact * (1 + deltas[name])
        print(f"{name:>10} {perplexity:11.3f} {deltas[name]:8.2%} {size / whole:18.2f}")
    print()
    print(json.dumps({"vs_generate": min(ratios), "int8_ppl_delta": max(deltas.values())}))


def _bytes_in_bfloat16(model: Any) -> int:
    """Return what the weights take where those that are no integers have two bytes."""
    weights = (*model.parameters(), *model.buffers())
    return sum(w.numel() * (2 if w.is_floating_point() else 1) for w in weights)


def _load(files: ModelFiles, store: ModelStore) -> Any:
    return load_causal_lm(files, store, device=torch.device("cpu"), dtype=torch.float32)


def _compare(files: ModelFiles, store: ModelStore, rounds: int) -> list[float]:
    """Print both speeds for every cell; return ours over theirs."""
    options = RunnerOptions(context=CONTEXT)
    runner = open_model(
        files, store, device=torch.device("cpu"), dtype=torch.float32, options=options
    )
    model, corpus = _load(files, store), Corpus(files)
    # An engine that runs for weeks has touched all its pages.
    for _ in range(2):
        _ours(runner, corpus.prompts(*CELLS[-1]))
    ours: dict[tuple[int, int], list[float]] = {cell: [] for cell in CELLS}
    theirs: dict[tuple[int, int], list[float]] = {cell: [] for cell in CELLS}
    for _ in range(rounds):
        for sequences, prompt in CELLS:
            ours[sequences, prompt].append(_ours(runner, corpus.prompts(sequences, prompt)))
            theirs[sequences, prompt].append(_theirs(model, corpus.prompts(sequences, prompt)))
    print(f"{'sequences':>10} {'prompt':>7} {'ours':>9} {'generate':>9} {'ratio':>6}  tokens/s")
    ratios = []
    for sequences, prompt in CELLS:
        pair = [statistics.median(rates[sequences, prompt]) for rates in (ours, theirs)]
        ratios.append(pair[0] / pair[1])
        print(f"{sequences:10} {prompt:7} {pair[0]:9.1f} {pair[1]:9.1f} {ratios[-1]:6.2f}")
    return ratios


def _ours(runner: Runner, prompts: list[list[int]]) -> float:
    sizes = runner.step_sizes
    scheduler = Scheduler(
        runner.space, max_waiting=len(prompts), chunk=sizes.chunk, budget=sizes.budget
    )
    sequences = [Sequence(tokens=list(p), draw=TokenDraw(0.0, 0)) for p in prompts]
    for sequence in sequences:
        scheduler.add(sequence)

    def step() -> None:
        rows = scheduler.plan()
        choices = list(runner.step(rows))
        scheduler.computed(rows)
        for row, token in zip((r for r in rows if r.wants_logits), choices, strict=True):
            scheduler.append(row.sequence, token)

    while not all(
        sequence.decoding and len(sequence.tokens) > len(prompts[0]) for sequence in sequences
    ):
        step()
    began = time.perf_counter()
    for _ in range(NEW):
        step()
    seconds = time.perf_counter() - began
    for sequence in sequences:
        scheduler.leave(sequence)
    return len(prompts) * NEW / seconds


def _theirs(model: Any, prompts: list[list[int]]) -> float:
    ids = torch.tensor(prompts)

    def seconds(new: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - began

    first = seconds(1)
    return len(prompts) * NEW / (seconds(NEW + 1) - first)


@torch.inference_mode()
def _perplexity(model: Any, text: list[int]) -> float:
    losses = []
    for begin in range(0, len(text) - 1, WINDOW):
        ids = torch.tensor([text[begin : begin + WINDOW]])
        losses.append(torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:]))
    return math.exp(torch.stack(losses).mean())


if __name__ == "__main__":
    main()
