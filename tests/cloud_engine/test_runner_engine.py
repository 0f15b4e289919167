"""The batch engine over the runner: texts, and what becomes of requests that fail."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_capture import FakeCapture
from runner_steps import BLOCK_BYTES, SMALLEST, limit_forward, open_runner, plain_logits
from tiny_models import TINY, random_model

from cloud_engine.runner import Runner
from engine_core.batch_engine import BatchEngine
from engine_core.errors import EngineFailureError
from engine_core.fake_engine import ByteTokenizer
from engine_core.types import FinishEvent, GenerationRequest, Sampling, TextEvent, TokenLogprob

MARKER = 255
"""A byte that is in no UTF-8 text, for prompts that something is to happen to."""
DOOMED = (*b"1234567890" * 4, MARKER)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> Any:
    model = random_model("llama", **TINY | {"vocab_size": ByteTokenizer.vocab_size})
    # So that no answer has the marker, or the token behind it, which would end it early.
    model.lm_head.register_forward_hook(unlikely)
    return model


def unlikely(_module: Any, _inputs: Any, logits: torch.Tensor) -> None:
    logits[..., MARKER:].fill_(-30)


@asynccontextmanager
async def serving(runner: Runner) -> AsyncIterator[BatchEngine]:
    engine = BatchEngine(model="m", load=lambda: runner, tokenizer=ByteTokenizer())
    await engine.start()
    try:
        yield engine
        assert runner.details["kv_blocks_free"] == runner.details["kv_blocks"]
        assert engine.stats().running == 0
    finally:
        await engine.close()


def requests() -> list[GenerationRequest]:
    """Return requests for whose tokens a device, or only the host, can draw."""
    ways = (
        Sampling(temperature=0),
        Sampling(temperature=1.3, seed=5),
        Sampling(temperature=1.0, top_p=0.8, seed=7),
        Sampling(temperature=0, frequency_penalty=1.0),
        Sampling(temperature=0.7, seed=-1),
    )
    return [
        GenerationRequest(
            id=str(index),
            prompt_ids=tuple(f"{index}. What comes before an answer".encode()),
            max_tokens=50,
            sampling=how,
        )
        for index, how in enumerate(ways)
    ]


async def answer(engine: BatchEngine, request: GenerationRequest) -> tuple[str, list[TokenLogprob]]:
    text, logprobs = "", []
    async for event in engine.generate(request):
        if isinstance(event, TextEvent):
            text += event.text
            logprobs += event.logprobs
        elif isinstance(event, FinishEvent):
            assert event.usage.completion_tokens == request.max_tokens
    return text, logprobs


async def answers(engine: BatchEngine, asked: Sequence[GenerationRequest]) -> list[str]:
    return [text for text, _ in await asyncio.gather(*(answer(engine, r) for r in asked))]


async def alone(runner: Runner) -> list[str]:
    async with serving(runner) as engine:
        return [(await answer(engine, request))[0] for request in requests()]


@pytest.mark.parametrize("graphs", [False, True])
async def test_text_depends_on_the_seed_and_not_on_the_company(model: Any, graphs: bool) -> None:
    texts = await alone(open_runner(model, capture=FakeCapture() if graphs else None))
    assert len(set(texts)) == len(texts)
    async with serving(open_runner(model, capture=FakeCapture() if graphs else None)) as engine:
        assert await answers(engine, requests()) == texts
        other = replace(requests()[1], sampling=Sampling(temperature=1.3, seed=6))
        assert (await answer(engine, other))[0] != texts[1]


async def test_who_makes_room_and_begins_anew_says_the_same(model: Any) -> None:
    texts = await alone(open_runner(model))
    async with serving(open_runner(model, kv_memory=SMALLEST + 3 * BLOCK_BYTES)) as engine:
        assert await answers(engine, requests()) == texts
        assert engine.stats().preempted_total > 0


async def test_a_request_that_memory_does_not_suffice_for_fails_alone(model: Any) -> None:
    texts = await alone(open_runner(model))
    runner = open_runner(model)
    limit_forward(
        runner,
        lambda tokens: tokens.shape[1] > 40 or bool((tokens == MARKER).any()),
        torch.OutOfMemoryError("CUDA out of memory"),
    )
    async with serving(runner) as engine:
        doomed = asyncio.create_task(answer(engine, replace(requests()[0], prompt_ids=DOOMED)))
        assert await answers(engine, requests()) == texts
        with pytest.raises(EngineFailureError, match="no memory left for a sequence of 41 tokens"):
            await doomed
        assert engine.stats().failed_total == 1


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("how", [Sampling(temperature=0), Sampling(temperature=1, top_p=0.5)])
async def test_a_model_that_computes_no_numbers_fails_the_request_alone(
    model: Any, graphs: bool, how: Sampling
) -> None:
    texts = await alone(open_runner(model, capture=FakeCapture() if graphs else None))
    runner = open_runner(model, capture=FakeCapture() if graphs else None)
    runner._model._model.model.embed_tokens.weight.data[MARKER] = math.nan
    async with serving(runner) as engine:
        broken = replace(requests()[0], prompt_ids=DOOMED, sampling=how)
        doomed = asyncio.create_task(answer(engine, broken))
        assert await answers(engine, requests()) == texts
        with pytest.raises(EngineFailureError):
            await doomed
        assert await answers(engine, requests()) == texts  # in blocks that it has left


@pytest.mark.parametrize("graphs", [False, True])
async def test_log_probabilities_are_those_of_the_model(model: Any, graphs: bool) -> None:
    (first, *_) = requests()
    async with serving(open_runner(model, capture=FakeCapture() if graphs else None)) as engine:
        (_, likeliest), plain = await asyncio.gather(
            answer(engine, replace(first, logprobs=2)), answer(engine, first)
        )
    assert plain[1] == []
    tokens = [entry.token for entry in likeliest]
    logits = torch.from_numpy(plain_logits(model, [*first.prompt_ids, *tokens]))
    wanted = logits.log_softmax(dim=1)[len(first.prompt_ids) - 1 : -1]
    assert tokens == wanted.argmax(dim=1).tolist()
    found = torch.tensor([entry.logprob for entry in likeliest])
    torch.testing.assert_close(found, wanted.amax(dim=1), rtol=0, atol=1e-4)


async def test_pressure_makes_the_engine_forget_prompts(model: Any) -> None:
    (first, *_) = requests()
    async with serving(open_runner(model)) as engine:
        await answer(engine, first)
        await engine.pressure(1)
        await answer(engine, first)
        assert engine.stats().cached_prompt_tokens_total == 16
        await engine.pressure(2)
        await answer(engine, first)
        assert engine.stats().cached_prompt_tokens_total == 16
