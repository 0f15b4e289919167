"""The cloud engine on a GPU: steps as graphs against eager ones, and against transformers' own.

    python benchmarks/cloud_gpu.py [--shape 7b] [--device cuda]

Within 8 minutes and without a download: the weights are random, of Llama 2 7B's shape and in
bfloat16. Two engines have the same weights, one with graphs and one without; they take turns, and
figures are medians. Each part has a share of the time and says so if it was cut short.

* `buckets_ok`: graphs that agreed with eager steps, of those that were to be captured.
* `bandwidth_share_b1`: bytes that a step must read (weights without the embedding table, keys and
  values of the sequence so far) per time between two tokens of a single sequence, after the
  shortest prompt, to what the device's memory moves, measured here; see `memory_bandwidth`.
* `ttft_gain`: by prompt tokens of a single sequence, the share of the time to the first token that
  graphs save.
* `qps_gain_b8`: requests per second of 8 clients that never pause, with graphs to without, less 1.
* `vs_generate_eager`, `vs_generate_compiled`: tokens per second of 8 sequences, prefill and all, to
  those of transformers' `generate`: with its growing cache, and with a static one and the compiled
  forward pass that it then uses. Compiling, which is not counted, must be done within its share.
* `oom_drill_lost`: of 8 requests that generate, those lost when a long prompt comes to an engine
  without graphs while a ballast leaves the GPU no memory for more than a small step.

`--shape tiny --device cpu` shows that the script works; what takes a GPU is null there. Prints
tables and, last, one JSON line.
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from gpu_drill import filled, lost_for_want_of_memory
from gpu_engines import (
    Engine,
    generate_rate,
    memory_bandwidth,
    own_attention,
    random_llama,
    weights_read,
)
from gpu_shapes import SHAPES, Shape
from timing import first_token_seconds, gaps, whole_rate

from cloud_engine.device import pick_device, pick_dtype
from cloud_engine.graphs import bucket_sizes
from cloud_engine.memory_plan import BLOCK_SIZE
from cloud_engine.packed_model import PackedModel
from cloud_engine.runner import RunnerOptions
from engine_core.ladder import Ladder

SECONDS = 460
"""Of 8 minutes, what is not taken by starting Python and stopping it."""
CELL_SECONDS, SERVE_SECONDS, GENERATE_SECONDS, COMPILE_SECONDS = 170, 50, 40, 120
ROUNDS = 5
CLIENTS = 8
SERVED = 3 * CLIENTS
COMPILED_RUNS = 3
WORK_BYTES = 16 * 2**30
"""Of a GPU, beside weights, keys and values: for steps, graphs, and transformers' caches."""

ALL_THE_WAY = Ladder(((float("inf"), 1.0),))
"""Whatever else is on the GPU is part of the measurement: nobody makes room for it."""


@dataclass
class Cell:
    """What the rounds found for one engine, number of sequences and length of prompt."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class TimeUpError(BaseException):
    """A part's time is up; no library's handler of errors may take it for one."""


class Bench:
    """The weights, the engines, and the time that is left.

    Args:
        shape: What is asked of them.
        device: Where they are.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.engines: dict[str, Engine] = {}
        self.cells: dict[tuple[int, int], dict[str, Cell]] = {}
        self.ours = 0.0
        self._end = time.monotonic() + SECONDS
        self._random = random.Random(0)
        self.bandwidth = memory_bandwidth(device)
        self.model = random_llama(shape.model, device, pick_dtype("auto", device))
        self.packed = PackedModel(self.model)
        self.step_bytes = weights_read(self.model)

    async def start(self) -> None:
        """Start the engines: without graphs and, on a GPU, with."""
        kinds = {"eager": False, "graphs": True} if self.device.type == "cuda" else {"eager": False}
        block_bytes = self.packed.token_bytes * BLOCK_SIZE
        wanted = self.shape.blocks(max(self.shape.batches), max(self.shape.prompts))
        kv = wanted * block_bytes
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            kv = min(kv, (free - WORK_BYTES) // len(kinds))
        for name, graphs in kinds.items():
            options = RunnerOptions(
                context=self.shape.context,
                max_running=max(self.shape.batches),
                kv_memory=kv,
                graphs=graphs,
                ladder=ALL_THE_WAY,
            )
            self.engines[name] = Engine(self.packed, options)
            await self.engines[name].start()
        affordable = kv // block_bytes
        for prompt, batch in itertools.product(self.shape.prompts, self.shape.batches):
            if self.shape.blocks(batch, prompt) <= affordable:
                self.cells[batch, prompt] = defaultdict(Cell)
            else:
                print(
                    f"{batch} sequences of {prompt} tokens do not fit into memory twice: left out"
                )
        for engine in self.engines.values():  # warms up
            for prompt in self.shape.prompts:
                await engine.run(self.prompts(1, prompt), 4)
            await engine.run(self.prompts(max(self.shape.batches), self.shape.prompts[0]), 4)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return random prompts."""
        vocabulary = self.shape.model["vocab_size"]
        return [self._random.choices(range(vocabulary), k=length) for _ in range(count)]

    def until(self, seconds: float) -> float:
        """Return when a part that may take so long ends, on the monotonic clock."""
        return min(self._end, time.monotonic() + seconds)

    @property
    def best(self) -> str:
        """The engine that would be served: the one with graphs, where there is one."""
        return "graphs" if "graphs" in self.engines else "eager"

    async def close(self) -> None:
        """Free what the engines have, but for the weights."""
        for engine in self.engines.values():
            await engine.close()
        self.engines.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def rounds(name: str, end: float) -> Iterator[int]:
    """Count rounds until they are enough or the time is up."""
    for number in range(ROUNDS):
        if time.monotonic() >= end:
            print(f"{name}: cut after {number} of {ROUNDS} rounds")
            return
        yield number


def turns(engines: dict[str, Engine], number: int) -> list[tuple[str, Engine]]:
    """Return the engines in an order that changes from round to round."""
    pairs = list(engines.items())
    return pairs[::-1] if number % 2 else pairs


async def measure_cells(bench: Bench) -> dict[str, Any]:
    """Measure first tokens and the time between tokens, cell by cell."""
    end = bench.until(CELL_SECONDS)
    for number in rounds("cells", end):
        for (batch, prompt), cell in bench.cells.items():
            if time.monotonic() >= end:
                print(f"cells: cut in round {number + 1}, before {batch} x {prompt}")
                break
            for name, engine in turns(bench.engines, number):
                times = await engine.run(bench.prompts(batch, prompt), bench.shape.new_cell)
                cell[name].first.append(first_token_seconds(times))
                cell[name].gaps += gaps(times)
    return print_cells(bench)


def print_cells(bench: Bench) -> dict[str, Any]:
    """Print what the rounds found; return what of it is wanted."""
    found: dict[str, Any] = {"ttft_gain": {}}
    print("\nsequences  prompt  engine  rounds  ttft ms  gap p50 ms  gap p99 ms  share")
    for (batch, prompt), cell in bench.cells.items():
        first = {}
        for name, each in cell.items():
            first[name] = statistics.median(each.first)
            p50 = statistics.median(each.gaps)
            p99 = statistics.quantiles(each.gaps, n=100, method="inclusive")[98]
            context = prompt + bench.shape.new_cell / 2
            read = bench.step_bytes + batch * context * bench.packed.token_bytes
            share = read / p50 / bench.bandwidth
            print(
                f"{batch:>9}  {prompt:>6}  {name:<6}  {len(each.first):>6}"
                f"  {first[name] * 1e3:>7.1f}  {p50 * 1e3:>10.2f}  {p99 * 1e3:>10.2f}"
                f"  {share:>5.0%}"
            )
            if (batch, prompt, name) == (1, min(bench.shape.prompts), bench.best):
                found["bandwidth_share_b1"] = round(share, 3)
        if batch == 1 and len(first) == 2:
            found["ttft_gain"][str(prompt)] = round(1 - first["graphs"] / first["eager"], 3)
    return found


async def serve(bench: Bench) -> dict[str, Any]:
    """Measure requests per second of clients that never pause."""
    rates = defaultdict(list)
    for number in rounds("requests", bench.until(SERVE_SECONDS)):
        for name, engine in turns(bench.engines, number):
            rates[name].append(await served_per_second(engine, bench))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    print(f"\n{CLIENTS} clients, {bench.shape.prompt} + {bench.shape.new} tokens, requests/s")
    for name, rate in medians.items():
        print(f"  {name:<6}  {rate:>8.2f}")
    if len(medians) < 2:
        return {}
    return {"qps_gain_b8": round(medians["graphs"] / medians["eager"] - 1, 3)}


async def served_per_second(engine: Engine, bench: Bench) -> float:
    """Return the rate at which the clients are served."""
    rest = iter(bench.prompts(SERVED, bench.shape.prompt))

    async def client() -> None:
        for prompt in rest:
            await engine.run([prompt], bench.shape.new)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return SERVED / (time.monotonic() - began)


async def generate_eager(bench: Bench) -> dict[str, Any]:
    """Compare with transformers' `generate` as it is."""
    shape = bench.shape
    rates = defaultdict(list)
    for number in rounds("generate", bench.until(GENERATE_SECONDS)):
        times = await bench.engines[bench.best].run(bench.prompts(CLIENTS, shape.prompt), shape.new)
        with own_attention(bench.model):
            theirs = generate_rate(bench.model, bench.prompts(CLIENTS, shape.prompt), shape.new)
        if number:  # the first warms transformers up
            rates["ours"].append(whole_rate(times))
            rates["theirs"].append(theirs)
    bench.ours, theirs = (statistics.median(rates[who]) for who in ("ours", "theirs"))
    print(f"\n{CLIENTS} sequences, {shape.prompt} + {shape.new} tokens, tokens/s")
    print(f"  ours              {bench.ours:>8.1f}\n  generate          {theirs:>8.1f}")
    return {"vs_generate_eager": round(bench.ours / theirs, 3)}


async def generate_compiled(bench: Bench) -> dict[str, Any]:
    """Compare with transformers' `generate` on a static cache, which it compiles for."""
    if bench.device.type != "cuda":
        return {}
    await bench.close()
    shape, rates = bench.shape, []
    with own_attention(bench.model), alarm(bench.until(COMPILE_SECONDS)):
        for _ in range(2 + COMPILED_RUNS):  # the first compiles, and the second captures graphs
            prompts = bench.prompts(CLIENTS, shape.prompt)
            rates.append(
                generate_rate(bench.model, prompts, shape.new, cache_implementation="static")
            )
    if not hasattr(bench.model, "_compiled_call"):
        raise RuntimeError("transformers has compiled nothing")
    theirs = statistics.median(rates[2:])
    print(f"  generate compiled {theirs:>8.1f}")
    return {"vs_generate_compiled": round(bench.ours / theirs, 3)}


@contextmanager
def alarm(end: float) -> Iterator[None]:
    """Raise `TimeUpError` in the main thread at a moment of the monotonic clock."""

    def ring(*_: object) -> None:
        raise TimeUpError("its time is up")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, end - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def drill(bench: Bench) -> dict[str, Any]:
    """Let a long prompt come when there is no memory for it."""
    if bench.device.type != "cuda":
        return {}
    (long,) = bench.prompts(1, max(bench.shape.prompts))
    others = bench.prompts(CLIENTS, bench.shape.prompt)
    full = filled(bench.device)
    lost = await lost_for_want_of_memory(
        bench.engines["eager"], others, long, bench.shape.new_drill, full
    )
    return {"oom_drill_lost": lost}


def check_graphs(bench: Bench) -> dict[str, Any]:
    """Count the graphs that agreed with eager steps."""
    if "graphs" not in bench.engines:
        return {}
    runner = bench.engines["graphs"].runner
    wanted = bucket_sizes(runner.step_sizes.budget)
    captured = str(runner.details["graph_buckets"]).split()
    print(f"graphs: {runner.details['graphs']}; of {', '.join(captured) or 'no'} tokens")
    return {"buckets_ok": f"{len(captured)}/{len(wanted)}"}


PARTS: tuple[Callable[[Bench], Awaitable[dict[str, Any]]], ...] = (
    measure_cells,
    serve,
    drill,
    generate_eager,
    generate_compiled,
)


async def measure(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Measure, print tables and return the result; a part that fails says why, and is null."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found: dict[str, Any] = {
        "device": name,
        "buckets_ok": None,
        "bandwidth_share_b1": None,
        "ttft_gain": dict.fromkeys(map(str, shape.prompts)),
        "qps_gain_b8": None,
        "vs_generate_eager": None,
        "vs_generate_compiled": None,
        "oom_drill_lost": None,
    }
    bench = Bench(shape, device)
    print(
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}: "
        f"{bench.step_bytes / 1e9:.2f} GB of weights, {bench.bandwidth / 1e9:,.0f} GB/s"
    )
    await bench.start()
    found |= check_graphs(bench)
    for part in PARTS:
        try:
            news = await part(bench)
        except (Exception, TimeUpError) as error:  # noqa: BLE001 - the other parts go on
            print(f"{part.__name__}: {type(error).__name__}: {error}")
            traceback.print_exc()
            continue
        found["ttft_gain"] |= news.pop("ttft_gain", {})
        found |= news
    await bench.close()
    print()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="7b", help="of the model (7b)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(cuda)")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    print(json.dumps(asyncio.run(measure(SHAPES[args.shape], pick_device(args.device)))))


if __name__ == "__main__":
    main()
