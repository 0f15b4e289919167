"""Tidegate's edge engine, as `python -m edge_engine serve` makes it, without the HTTP in front."""

import asyncio
import functools
import time
import uuid

import uvloop
from protocol import Run, Times, serve

from edge_engine.build import ensure_build
from edge_engine.open_model import open_model
from engine_core.batch_engine import BatchEngine
from engine_core.models import ModelStore
from engine_core.tokenizer import Tokenizer
from engine_core.types import GenerationRequest, Sampling, TextEvent

NEVER = -100.0
"""A bias that keeps a token from being drawn, as OpenAI defines it."""


def load(model: str, threads: int) -> tuple[str, Run]:
    """Load the model; see `protocol.serve`."""
    store = ModelStore()
    files = store.pull(model)
    build = ensure_build(store, files)
    engine = BatchEngine(
        model=files.label,
        load=functools.partial(open_model, build, threads=threads),
        tokenizer=Tokenizer.load(files),
    )
    loop = uvloop.new_event_loop()
    loop.run_until_complete(engine.start())
    # No end of turn, as the peers are told as well.
    sampling = Sampling(
        temperature=0, logit_bias=tuple((id_, NEVER) for id_ in engine.tokenizer.eos_ids)
    )

    async def generate(prompt: list[int], max_tokens: int, began: float) -> list[float]:
        name = uuid.uuid4().hex
        request = GenerationRequest(
            id=name,
            prompt_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling,
            continues=True,
            cache_salt=name,  # nothing from an earlier prompt
        )
        # A token that completes no character has no event, and is not counted.
        return [
            time.perf_counter() - began
            async for event in engine.generate(request)
            if isinstance(event, TextEvent)
        ]

    async def generate_all(prompts: list[list[int]], max_tokens: int) -> Times:
        began = time.perf_counter()
        return await asyncio.gather(*(generate(prompt, max_tokens, began) for prompt in prompts))

    def run(prompts: list[list[int]], max_tokens: int) -> Times:
        return loop.run_until_complete(generate_all(prompts, max_tokens))

    return "Tidegate edge", run


if __name__ == "__main__":
    serve(load)
