"""What the edge engine saves when a conversation goes on, and that nobody else profits from it.

    python benchmarks/edge_prefix.py [--rounds 7]

Each round asks with a prompt of 1,024 tokens, then again with the same prompt, an answer and 48
new tokens, as the second turn of a conversation, and then sends the second turn once more as
another tenant. All on the real engine process over its UNIX socket, one request at a time; no round
repeats an earlier one's text. `second_turn_ttft_ratio` is the median over rounds of the second
turn's first-token time to the first's; `other_tenant_cached_tokens` is how many prompt tokens the
other tenant found in place, in all rounds.

Prints a table and, last, one JSON line.
"""

import argparse
import asyncio
import json
import statistics

from corpus import Corpus
from engine_process import EngineClient, Request, engine_process

from engine_core.models import BUILTIN, ModelStore

FIRST, ANSWER, SECOND = 1024, 32, 48


async def first_token_and_cached(engine: EngineClient, request: Request) -> tuple[float, int]:
    """Return a request's seconds to the first token, and its prompt tokens found in place."""
    before = (await engine.stats())["cached_prompt_tokens_total"]
    timing = await engine.stream(request)
    return timing.first_token_seconds, (await engine.stats())["cached_prompt_tokens_total"] - before


async def measure(rounds: int) -> dict[str, float]:
    """Measure, print a table and return the result."""
    files = ModelStore().pull(BUILTIN)
    corpus = Corpus(files)
    ratios, foreign = [], 0
    print("round   first turn ms   second turn ms   in place   other tenant ms   in place")
    async with engine_process(files) as engine:
        await engine.stream(Request(corpus.prompt(64), 16, "warm-up"))
        for round_ in range(rounds):
            prompt = corpus.prompt(FIRST)
            turn = [*prompt, *corpus.prompt(ANSWER + SECOND)]
            first, _ = await first_token_and_cached(engine, Request(prompt, ANSWER, "one"))
            second, cached = await first_token_and_cached(engine, Request(turn, 1, "one"))
            other, others_cached = await first_token_and_cached(engine, Request(turn, 1, "two"))
            foreign += others_cached
            ratios.append(second / first)
            print(
                f"{round_:>5}   {first * 1e3:>13.0f}   {second * 1e3:>14.0f}   {cached:>8}"
                f"   {other * 1e3:>15.0f}   {others_cached:>8}"
            )
    print()
    return {
        "second_turn_ttft_ratio": statistics.median(ratios),
        "other_tenant_cached_tokens": foreign,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="conversations (7)")
    print(json.dumps(asyncio.run(measure(parser.parse_args().rounds))))


if __name__ == "__main__":
    main()
