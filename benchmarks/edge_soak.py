"""Does the edge engine leak? Many short requests, some of them hung up on, and then a count.

    python benchmarks/edge_soak.py [--requests 20000] [--cancel 0.2]

The real engine process over its UNIX socket, 12 requests at a time, so that some of them wait:
prompts of 4 to 40 tokens, 1 to 6 new ones, half of them streamed. They are of a handful of tenants,
and half of them open with their tenant's own 16 tokens, which an earlier request may have left. A
share is hung up on after a random time, waiting, prefilling or generating. RSS is read all along;
its slope after the first tenth is a least-squares fit. At the end, `slots_leaked` is how many fewer
requests run side by side than at the start, plus what still counts as running or waiting;
`fds_leaked` how many more files and sockets the engine has open. Prints a table and, last, one JSON
line.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator

import numpy as np
from corpus import Corpus
from engine_process import EngineClient, Request, engine_process

from engine_core.models import BUILTIN, ModelStore

CLIENTS = 12
TENANTS = 5
WARM_UP = 0.1
SAMPLES = 200
"""Readings of RSS over the whole run."""
CROWD = 16
"""Requests at once that find out how many run side by side; more than an engine has slots for."""


async def soak(
    engine: EngineClient, corpus: Corpus, count: int, cancel: float, rng: random.Random
) -> list[tuple[int, int]]:
    """Send the requests; return how many were done at each reading of RSS, and the bytes."""
    readings = []
    done = 0
    every = max(1, count // SAMPLES)
    openings = {f"tenant-{number}": corpus.prompt(16) for number in range(TENANTS)}

    async def one() -> None:
        tenant, opening = rng.choice(list(openings.items()))
        prompt = corpus.prompt(rng.randint(4, 24))
        if rng.random() < 0.5:
            prompt = opening + prompt
        request = Request(prompt, rng.randint(1, 6), tenant)
        answer = engine.stream(request) if rng.random() < 0.5 else engine.whole(request)
        seconds = rng.uniform(0, 0.1) if rng.random() < cancel else None
        try:
            await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            if seconds is None:
                raise

    async def client(mine: Iterator[int]) -> None:
        nonlocal done
        for _ in mine:
            await one()
            done += 1
            if done % every == 0:
                readings.append((done, engine.rss_bytes()))
                print(f"\r{done} of {count}", end="", file=sys.stderr)

    numbers = iter(range(count))
    await asyncio.gather(*(client(numbers) for _ in range(CLIENTS)))
    print(file=sys.stderr)
    return readings


async def side_by_side(engine: EngineClient, corpus: Corpus) -> int:
    """Return how many of a crowd of requests the engine runs at once."""
    crowd = asyncio.gather(
        *(engine.whole(Request(corpus.prompt(16), 64, "crowd")) for _ in range(CROWD))
    )
    most = 0
    while not crowd.done():
        most = max(most, (await engine.stats())["running"])
        await asyncio.sleep(0.02)
    await crowd
    return most


async def settled(engine: EngineClient, corpus: Corpus) -> tuple[int, int]:
    """Return how many requests run at once, and the open files once all connections are gone."""
    most = await side_by_side(engine, corpus)
    await engine.hang_up()
    return most, engine.fds()


async def measure(count: int, cancel: float, seed: int) -> dict[str, float]:
    """Measure, print a table and return the result."""
    files = ModelStore().pull(BUILTIN)
    corpus = Corpus(files, seed)
    async with engine_process(files) as engine:
        slots, fds = await settled(engine, corpus)
        began = time.monotonic()
        readings = await soak(engine, corpus, count, cancel, random.Random(seed))
        seconds = time.monotonic() - began
        stats = await engine.idle_stats()
        stuck = stats["running"] + stats["waiting"]
        slots_after, fds_after = await settled(engine, corpus)

    warm = [(at, rss) for at, rss in readings if at > WARM_UP * count]
    done, rss = np.array(warm, float).T
    slope = np.polyfit(done / 1e3, rss / 1e6, 1)[0]
    print(
        f"{count} requests in {seconds:.0f} s, {stats['cancelled_total']} hung up on, "
        f"{stats['cached_prompt_tokens_total']} prompt tokens not computed again\n"
    )
    print("requests done    RSS MB")
    for at, bytes_ in readings[:: max(1, len(readings) // 10)]:
        print(f"{at:>13}  {bytes_ / 1e6:>8.1f}")
    print(f"\nside by side: {slots} before, {slots_after} after; {stuck} left over")
    print(f"open files: {fds} before, {fds_after} after\n")
    return {
        "requests": count,
        "rss_slope_mb_per_1k": float(slope),
        "slots_leaked": slots - slots_after + stuck,
        "fds_leaked": fds_after - fds,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000, help="how many (20000)")
    parser.add_argument("--cancel", type=float, default=0.2, help="share hung up on (0.2)")
    parser.add_argument("--seed", type=int, default=0, help="of sizes and times (0)")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.requests, args.cancel, args.seed))))


if __name__ == "__main__":
    main()
