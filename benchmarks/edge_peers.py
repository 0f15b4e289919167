"""The edge engine beside llama.cpp, onnxruntime-genai and OpenVINO GenAI, on the same weights.

    make peers
    python benchmarks/edge_peers.py [--rounds 7] [--threads 2]

Every engine is a process of its own and runs the built-in model in its own 8-bit form: ours as
`serve` runs it, the peers as their makers advise (Q8_0 GGUF; the INT8 folder of genai's builder).
In a round each engine in turn gets the same three works, on prompts that no round before it had,
greedily and without an end of turn, while all others are stopped:

- decode: one sequence, 64 tokens of prompt, 128 new ones; tokens/s from the first to the last;
- prefill: 512 tokens of prompt; tokens/s until the first new token;
- batch: 8 sequences as in decode; tokens/s from the moment all have their first token.

Ratios are medians over rounds of ours to the peer's in the same round. `bandwidth_share` is what
our decoding reads of its weights per second, to what two threads can read per second here: from
memory or from a buffer of the weights' size, whichever is faster. Prints tables and, last, one
JSON line.
"""

import argparse
import json
import statistics
from collections import defaultdict
from contextlib import ExitStack

from bandwidth import MEMORY_BYTES, bytes_per_token, read_bandwidth
from corpus import Corpus
from peer_list import PEERS
from timing import decode_rate, first_token_seconds, whole_rate
from worker import Worker

from edge_engine.build import ensure_build
from edge_engine.manifest import GRAPH_FILE
from engine_core.models import BUILTIN, ModelStore

OURS = "tidegate"
SEQUENCES, PROMPT, NEW, LONG_PROMPT = 8, 64, 128, 512

Rates = dict[str, dict[str, list[float]]]
"""Tokens per second by engine and work, one for each round."""


def measure_round(workers: dict[str, Worker], corpus: Corpus, rates: Rates) -> None:
    """Give every engine the same works, one engine after the other."""
    warm_up = corpus.prompt(PROMPT)
    one = corpus.prompts(1, PROMPT)
    long = corpus.prompts(1, LONG_PROMPT)
    many = corpus.prompts(SEQUENCES, PROMPT)
    for name, worker in workers.items():
        worker.run([warm_up], 16)  # its weights may have left the caches while it was stopped
        found = rates[name]
        found["decode"].append(decode_rate(worker.run(one, NEW)))
        found["prefill"].append(LONG_PROMPT / first_token_seconds(worker.run(long, 1)))
        together = worker.run(many, NEW)
        found["batch"].append(decode_rate(together))
        found["batch, prefill and all"].append(whole_rate(together))


def ratio(rates: Rates, work: str, peer: str, ours: str | None = None) -> float | None:
    """Return the median over rounds of our rate to a peer's, None for an absent peer."""
    if peer not in rates:
        return None
    pairs = zip(rates[OURS][ours or work], rates[peer][work], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def print_rates(rates: Rates, engines: dict[str, str]) -> None:
    """Print the medians, with the lowest and highest round."""
    for work in rates[OURS]:
        print(f"{work + ', tokens/s':<34} {'median':>8} {'lowest':>8} {'highest':>8} {'ratio':>8}")
        for name, label in engines.items():
            found = rates[name][work]
            mine = ratio(rates, work, name)
            print(
                f"  {label:<32} {statistics.median(found):>8.1f} {min(found):>8.1f}"
                f" {max(found):>8.1f} {mine:>8.2f}"
            )
        print()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds (7)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine (2)")
    args = parser.parse_args()

    store = ModelStore()
    files = store.pull(BUILTIN)
    weights = bytes_per_token(ensure_build(store, files).folder / GRAPH_FILE)
    corpus = Corpus(files)
    rates: Rates = defaultdict(lambda: defaultdict(list))
    from_memory, from_cache = [], []
    with ExitStack() as stack:
        workers = {OURS: stack.enter_context(Worker.ours(BUILTIN, args.threads))}
        for peer in PEERS:
            if peer.ready:
                workers[peer.name] = stack.enter_context(Worker.of(peer, args.threads))
            else:
                print(f"{peer.name} is not installed; `make peers` installs it\n")
        for _ in range(args.rounds):
            from_memory.append(read_bandwidth(MEMORY_BYTES, args.threads))
            from_cache.append(read_bandwidth(weights, args.threads))
            measure_round(workers, corpus, rates)
        engines = {name: worker.engine for name, worker in workers.items()}

    print_rates(rates, engines)
    bandwidth = max(*from_memory, *from_cache)
    read = statistics.median(rates[OURS]["decode"]) * weights
    print(f"weights read per token          {weights / 1e6:>8.1f} MB")
    print(f"read in decode                  {read / 1e9:>8.1f} GB/s")
    print(f"bandwidth, from memory          {max(from_memory) / 1e9:>8.1f} GB/s")
    print(f"bandwidth, buffer of that size  {max(from_cache) / 1e9:>8.1f} GB/s\n")
    result = {
        "decode_vs_llamacpp": ratio(rates, "decode", "llamacpp"),
        "decode_vs_ortgenai": ratio(rates, "decode", "ortgenai"),
        "decode_vs_openvino": ratio(rates, "decode", "openvino"),
        "prefill512_vs_llamacpp": ratio(rates, "prefill", "llamacpp"),
        "prefill512_vs_openvino": ratio(rates, "prefill", "openvino"),
        "batch8_vs_single": ratio(rates, "decode", OURS, ours="batch"),
        "batch8_vs_openvino": ratio(rates, "batch", "openvino"),
        "bandwidth_share": read / bandwidth,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
