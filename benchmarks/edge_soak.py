"""Does the edge engine leak? Many short requests, some of them hung up on, and then a count.

    python benchmarks/edge_soak.py [--requests 20000] [--cancel 0.2]

The real engine process over its UNIX socket, 12 requests at a time, so that some of them wait:
prompts of 4 to 40 tokens, 1 to 6 new ones, half of them streamed. They are of a handful of tenants,
and half of them open with their tenant's own 16 tokens, which an earlier request may have left. A
share is hung up on after a random time, waiting, prefilling or generating. The engine's account of
its memory is read all along; slopes after the first tenth are least-squares fits.

Two parts of RSS are no leak and have an end, but come in at first touch. Before the count, requests
longer than any that follow touch the slots, and every token of the vocabulary goes through a
prompt: its row of the embedding is in a mapped file, and a text's rare words would bring in new
pages for tens of thousands of requests (59 of 113 MB after 2,500, measured on the built-in model).

At the end, `slots_leaked` is how many fewer requests run side by side than at the start, plus what
still counts as running or waiting; `fds_leaked` how many more files and sockets the engine has
open. Prints a table and, last, one JSON line.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator

import numpy as np
from corpus import Corpus
from engine_process import EngineClient, Request, engine_process

from engine_core.models import BUILTIN, ModelStore
from engine_core.tokenizer import Tokenizer

Reading = dict[str, int]
"""Bytes of RSS and of its parts, as the engine's stats name them, after so many `requests`."""

CLIENTS = 12
TENANTS = 5
WARM_UP = 0.1
SAMPLES = 200
"""Readings of memory over the whole run."""
CROWD = 16
"""Requests at once that find out how many run side by side; more than an engine has slots for."""
CROWD_TOKENS = 64
"""What each of them generates; more than a later request has tokens."""


async def with_clients(requests: Iterator[Coroutine[None, None, None]]) -> None:
    """Send the requests, `CLIENTS` at a time."""

    async def client() -> None:
        for request in requests:
            await request

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def touch_vocabulary(engine: EngineClient, size: int) -> None:
    """Send prompts in which every token comes once."""
    begins = range(0, size, CROWD_TOKENS)
    prompts = (range(begin, min(begin + CROWD_TOKENS, size)) for begin in begins)
    await with_clients(engine.whole(Request([*ids], 1, "vocabulary")) for ids in prompts)


async def soak(
    engine: EngineClient, corpus: Corpus, count: int, cancel: float, rng: random.Random
) -> list[Reading]:
    """Send the requests; return the readings of memory."""
    readings = []
    done = 0
    every = max(1, count // SAMPLES)
    openings = {f"tenant-{number}": corpus.prompt(16) for number in range(TENANTS)}

    async def one() -> None:
        nonlocal done
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
        done += 1
        if done % every == 0:
            print(f"\r{done} of {count}", end="", file=sys.stderr)
            now = done
            stats = await engine.stats()
            readings.append({"requests": now, "RSS": stats["rss_bytes"], **stats["memory"]})

    await with_clients(one() for _ in range(count))
    print(file=sys.stderr)
    return readings


async def side_by_side(engine: EngineClient, corpus: Corpus) -> int:
    """Return how many of a crowd of requests the engine runs at once."""
    crowd = asyncio.gather(
        *(engine.whole(Request(corpus.prompt(16), CROWD_TOKENS, "crowd")) for _ in range(CROWD))
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


def fit(readings: list[Reading]) -> dict[str, float]:
    """Return how many MB RSS and its parts gain with each 1,000 requests."""
    done = [each["requests"] / 1e3 for each in readings]
    return {
        part: float(np.polyfit(done, [each[part] / 1e6 for each in readings], 1)[0])
        for part in readings[0]
        if part != "requests"
    }


def print_table(readings: list[Reading], slopes: dict[str, float]) -> None:
    """Print RSS and its parts in MB, and their slopes."""

    def line(first: str, cells: Iterable[str]) -> None:
        columns = zip(slopes, cells, strict=True)
        print(f"{first:>14}", *(f"{cell:>{max(8, len(part))}}" for part, cell in columns), sep="  ")

    line("requests done", slopes)
    for each in readings:
        line(str(each["requests"]), (f"{each[part] / 1e6:.1f}" for part in slopes))
    line("MB per 1,000", (f"{slope:.3f}" for slope in slopes.values()))


async def measure(count: int, cancel: float, seed: int) -> dict[str, float]:
    """Measure, print a table and return the result."""
    files = ModelStore().pull(BUILTIN)
    corpus = Corpus(files, seed)
    async with engine_process(files) as engine:
        await touch_vocabulary(engine, Tokenizer.load(files).vocab_size)
        slots, fds = await settled(engine, corpus)
        began = time.monotonic()
        readings = await soak(engine, corpus, count, cancel, random.Random(seed))
        seconds = time.monotonic() - began
        stats = await engine.idle_stats()
        stuck = stats["running"] + stats["waiting"]
        slots_after, fds_after = await settled(engine, corpus)

    slopes = fit([each for each in readings if each["requests"] > WARM_UP * count])
    print(
        f"{count} requests in {seconds:.0f} s, {stats['cancelled_total']} hung up on, "
        f"{stats['cached_prompt_tokens_total']} prompt tokens not computed again\n"
    )
    print_table(readings[:: max(1, len(readings) // 10)], slopes)
    print(f"\nside by side: {slots} before, {slots_after} after; {stuck} left over")
    print(f"open files: {fds} before, {fds_after} after\n")
    return {
        "requests": count,
        "rss_slope_mb_per_1k": slopes["RSS"],
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
