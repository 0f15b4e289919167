"""The edge engine under mixed company: waiting behind long prompts, and against static batching.

    python benchmarks/edge_mixed.py [--requests 120] [--seed 0]

Two questions to the real engine process over its UNIX socket; no prompt repeats an earlier one.

1. What does a short request (32 tokens) wait for its first token while a prompt of 1,024 tokens is
   being prefilled? `ttft_p95_ratio` is the 95th percentile of that to the median on an idle engine.
2. How many requests are served well when 8 clients send at random, each a Poisson stream, one in
   four with a long prompt? Once the engine takes what comes; once a gate in front of it lets in
   what waits, up to 8, only after all of the last ones are done, which is static batching. Both see
   the same arrivals, at 80 % of the rate at which 8 clients that never pause are served. Served
   well is what MLPerf Inference asks of a language-model server: first token within 2 s of the
   arrival, 0.2 s from token to token. `goodput_vs_static` is the ratio of requests served well per
   second.

Prints tables and, last, one JSON line.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import numpy as np
from corpus import Corpus
from engine_process import EngineClient, Request, Timing, engine_process

from engine_core.models import BUILTIN, ModelStore

CLIENTS = 8
SHORT, LONG = 32, 1024
PROBES = 40
LOAD = 0.8
TTFT_SECONDS, TOKEN_SECONDS = 2.0, 0.2

Submit = Callable[[Request], Awaitable[Timing]]


@dataclass(frozen=True, slots=True)
class Served:
    """How one request of a run fared."""

    arrived: float
    timing: Timing

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the arrival, wherever it waited, to the first token."""
        return self.timing.tokens[0] - self.arrived

    @property
    def well(self) -> bool:
        """Whether both limits were kept."""
        return (
            self.first_token_seconds <= TTFT_SECONDS and self.timing.token_seconds <= TOKEN_SECONDS
        )


class Workload:
    """Requests of random sizes, each on a prompt of its own.

    Args:
        corpus: Where prompts come from.
        seed: The same seed gives the same sizes and arrivals.
    """

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self._corpus = corpus
        self._random = random.Random(seed)
        self._names = itertools.count()

    def request(self, prompt: int, max_tokens: int) -> Request:
        """Return a request of one size; its tenant is its own, so it shares no keys and values."""
        return Request(self._corpus.prompt(prompt), max_tokens, f"tenant-{next(self._names)}")

    def mixed(self, count: int) -> list[Request]:
        """Return long and short requests, one long in four."""
        return [
            self.request(
                LONG if self._random.random() < 0.25 else self._random.randint(16, 128),
                self._random.randint(8, 96),
            )
            for _ in range(count)
        ]

    def arrivals(self, count: int, rate: float) -> list[float]:
        """Return the seconds at which the clients' Poisson streams, taken together, arrive."""
        gaps = (self._random.expovariate(rate) for _ in range(count))
        return list(itertools.accumulate(gaps))


class StaticGate:
    """Lets requests into the engine in batches: the next one when all of the last are done."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._waiting: asyncio.Queue[tuple[Request, asyncio.Future[Timing]]] = asyncio.Queue()

    async def submit(self, request: Request) -> Timing:
        """Wait for a place in a batch, then for the answer."""
        answered: asyncio.Future[Timing] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((request, answered))
        return await answered

    async def run(self) -> None:
        """Serve batches until cancelled."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < CLIENTS and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            timings = await asyncio.gather(*(self._engine.stream(request) for request, _ in batch))
            for (_, answered), timing in zip(batch, timings, strict=True):
                answered.set_result(timing)


async def idle_ttfts(engine: EngineClient, work: Workload, prompt: int) -> list[float]:
    """Return the first-token times of requests that have the engine to themselves."""
    return [
        (await engine.stream(work.request(prompt, 1))).first_token_seconds
        for _ in range(PROBES // 2)
    ]


async def ttfts_behind_long(
    engine: EngineClient, work: Workload, long_seconds: float, rng: random.Random
) -> list[float]:
    """Return the first-token times of short requests that came during a long prefill."""
    found: list[float] = []
    while len(found) < PROBES:
        long = asyncio.create_task(engine.stream(work.request(LONG, 1)))
        await asyncio.sleep(rng.uniform(0, long_seconds))
        short = await engine.stream(work.request(SHORT, 1))
        if short.asked < (await long).tokens[0]:
            found.append(short.first_token_seconds)
    return found


async def served_per_second(engine: EngineClient, requests: list[Request]) -> float:
    """Return the rate at which clients that never pause are served."""
    rest = iter(requests)

    async def client(mine: Iterator[Request]) -> None:
        for request in mine:
            await engine.stream(request)

    began = time.monotonic()
    await asyncio.gather(*(client(rest) for _ in range(CLIENTS)))
    return len(requests) / (time.monotonic() - began)


async def replay(
    submit: Submit, requests: list[Request], arrivals: list[float]
) -> tuple[list[Served], float]:
    """Send each request at its time; return how each fared and the seconds until all were done."""
    began = time.monotonic()

    async def one(request: Request, at: float) -> Served:
        arrived = began + at
        await asyncio.sleep(arrived - time.monotonic())
        return Served(arrived, await submit(request))

    served = await asyncio.gather(*map(one, requests, arrivals))
    return served, time.monotonic() - began


async def measure(count: int, seed: int) -> dict[str, float]:
    """Measure, print tables and return the result."""
    files = ModelStore().pull(BUILTIN)
    work = Workload(Corpus(files, seed), seed)
    async with engine_process(files) as engine:
        await engine.stream(work.request(SHORT, 16))  # warms up
        idle = statistics.median(await idle_ttfts(engine, work, SHORT))
        long = statistics.median(await idle_ttfts(engine, work, LONG))
        behind = await ttfts_behind_long(engine, work, long, random.Random(seed))
        rate = LOAD * await served_per_second(engine, work.mixed(max(CLIENTS * 3, count // 4)))
        arrivals = work.arrivals(count, rate)
        sizes = work.mixed(count)
        runs = {"continuous": await replay(engine.stream, sizes, arrivals)}
        gate = StaticGate(engine)
        again = [work.request(len(size.prompt), size.max_tokens) for size in sizes]
        async with asyncio.TaskGroup() as group:
            batches = group.create_task(gate.run())
            runs["static"] = await replay(gate.submit, again, arrivals)
            batches.cancel()

    p50, p95 = np.percentile(behind, (50, 95))
    print(f"first token of {SHORT} tokens, ms          p50      p95")
    print(f"  on an idle engine           {idle * 1e3:>10.0f}")
    print(f"  while {LONG:,} are prefilled    {p50 * 1e3:>10.0f} {p95 * 1e3:>8.0f}")
    print(f"  (of {LONG:,}, alone)            {long * 1e3:>10.0f}\n")
    print(f"{count} requests at {rate:.2f}/s   served well  per second  ttft p50 s  ttft p95 s")
    goodput = {}
    for name, (served, seconds) in runs.items():
        well = sum(each.well for each in served)
        goodput[name] = well / seconds
        t50, t95 = np.percentile([each.first_token_seconds for each in served], (50, 95))
        print(
            f"  {name:<24} {well / count:>10.0%}  {goodput[name]:>10.2f}"
            f"  {t50:>10.2f}  {t95:>10.2f}"
        )
    print()
    return {
        "ttft_p95_ratio": p95 / idle,
        "goodput_vs_static": goodput["continuous"] / goodput["static"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=120, help="requests of each run (120)")
    parser.add_argument("--seed", type=int, default=0, help="of sizes and arrivals (0)")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.requests, args.seed))))


if __name__ == "__main__":
    main()
