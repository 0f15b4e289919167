"""Speed of the edge engine by number of sequences and length of prompt.

    python benchmarks/edge_decode.py [--rounds 5] [--threads 2]

The built-in model, as `serve` runs it, in a process of its own; greedy, without an end of turn, and
on prompts that were not seen before. `ttft` is when the last sequence had its first token, `gap`
the time between two tokens of a sequence, `tokens/s` of all sequences together while all of them
generate, `share` what is read of the weights per second (each step reads them once) to what two
threads can read per second here. RSS is what the process has after the cell. Prints a table and,
last, one JSON line.
"""

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from bandwidth import bytes_per_token, read_limit
from corpus import Corpus
from timing import decode_rate, first_token_seconds, gaps
from worker import Worker

from edge_engine.build import ensure_build
from edge_engine.manifest import GRAPH_FILE
from engine_core.models import BUILTIN, ModelStore

SEQUENCES = (1, 2, 4, 8)
PROMPTS = (64, 512, 1024)
NEW = 64


@dataclass
class Cell:
    """What the rounds found for one number of sequences and one length of prompt."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    rss_bytes: int = 0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine (2)")
    args = parser.parse_args()

    store = ModelStore()
    files = store.pull(BUILTIN)
    weights = bytes_per_token(ensure_build(store, files).folder / GRAPH_FILE)
    corpus = Corpus(files)
    cells: dict[tuple[int, int], Cell] = defaultdict(Cell)
    limits = []
    with Worker.ours(BUILTIN, args.threads) as worker:
        for _ in range(args.rounds):
            limits.append(read_limit(weights, args.threads))
            worker.run(corpus.prompts(1, PROMPTS[0]), 16)  # warms up
            for sequences in SEQUENCES:
                for prompt in PROMPTS:
                    times = worker.run(corpus.prompts(sequences, prompt), NEW)
                    cell = cells[sequences, prompt]
                    cell.first.append(first_token_seconds(times))
                    cell.gaps += gaps(times)
                    cell.rates.append(decode_rate(times))
                    cell.rss_bytes = worker.rss_bytes()

    limit = max(limits)
    rows = []
    for (sequences, prompt), cell in cells.items():
        rate = statistics.median(cell.rates)
        p50, p99 = np.percentile(cell.gaps, (50, 99))
        rows.append(
            {
                "sequences": sequences,
                "prompt": prompt,
                "ttft_ms": statistics.median(cell.first) * 1e3,
                "gap_p50_ms": p50 * 1e3,
                "gap_p99_ms": p99 * 1e3,
                "tokens_per_s": rate,
                "rss_mb": cell.rss_bytes / 1e6,
                "bandwidth_share": rate / sequences * weights / limit,
            }
        )
    print(
        f"{files.label}, {NEW} new tokens, {weights / 1e6:.0f} MB of weights, "
        f"{args.threads} threads read {limit / 1e9:.1f} GB/s\n"
    )
    print("sequences  prompt  ttft ms  gap p50 ms  gap p99 ms  tokens/s  RSS MB  share")
    for row in rows:
        print(
            f"{row['sequences']:>9}  {row['prompt']:>6}  {row['ttft_ms']:>7.0f}"
            f"  {row['gap_p50_ms']:>10.1f}  {row['gap_p99_ms']:>10.1f}"
            f"  {row['tokens_per_s']:>8.1f}  {row['rss_mb']:>6.0f}  {row['bandwidth_share']:>5.0%}"
        )
    print()
    print(json.dumps({"bandwidth_gb_per_s": limit / 1e9, "cells": rows}))


if __name__ == "__main__":
    main()
