"""The one-at-a-time engine over a scripted model: order, cancellation, failures, no leaks."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_core.errors import ApiError, EngineFailureError, ModelError, OverloadedError
from engine_core.fake_engine import EOS, ByteTokenizer
from engine_core.sequential import PREFILL_CHUNK, SequentialEngine
from engine_core.types import Event, FinishEvent, GenerationRequest, Sampling, TextEvent

WINDOW = 2000
PROMPT_TOKEN = 0  # in no reply


class FakeStepModel:
    """Answers with the scripted bytes; each forward may wait for a gate or fail."""

    context_window = WINDOW
    kv_total_bytes = WINDOW * 10
    details: dict[str, str | int | float | bool] = {"kind": "fake"}  # noqa: RUF012

    def __init__(self, reply: bytes = b"Hello there.") -> None:
        self.reply = [*reply, EOS]
        self.sequence: list[int] = []
        self.generated = 0
        self.chunks: list[int] = []
        self.before_forward: Callable[[], None] = lambda: None
        self.closed = False
        self.threads: set[int] = set()

    @property
    def kv_used_bytes(self) -> int:
        return len(self.sequence) * 10

    def reset(self) -> None:
        self.sequence.clear()
        self.generated = 0
        self.threads.add(threading.get_ident())

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        self.before_forward()
        self.threads.add(threading.get_ident())
        self.chunks.append(len(token_ids))
        self.sequence.extend(token_ids)
        logits = np.zeros(ByteTokenizer.vocab_size, np.float32)
        self.generated += sum(token != PROMPT_TOKEN for token in token_ids)
        logits[self.reply[min(self.generated, len(self.reply) - 1)]] = 50
        return logits

    def close(self) -> None:
        self.closed = True


class Gate:
    """Stops the model before each forward until it is let through."""

    def __init__(self, model: FakeStepModel) -> None:
        self._permits = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)
        model.before_forward = self._wait

    def _wait(self) -> None:
        self.reached.release()
        assert self._permits.acquire(timeout=10)

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.acquire, timeout=10)

    def open(self, times: int = 1) -> None:
        self._permits.release(times)


def request(
    prompt: int = 3, max_tokens: int = 100, stop: tuple[str, ...] = (), name: str = "r"
) -> GenerationRequest:
    return GenerationRequest(
        id=name,
        prompt_ids=(PROMPT_TOKEN,) * prompt,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0),
        stop=stop,
    )


@asynccontextmanager
async def running(model: FakeStepModel, max_waiting: int = 64) -> AsyncIterator[SequentialEngine]:
    engine = SequentialEngine(
        model="fake", load=lambda: model, tokenizer=ByteTokenizer(), max_waiting=max_waiting
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
    assert model.closed
    assert len(model.threads) <= 1


async def collect(engine: SequentialEngine, ask: GenerationRequest) -> tuple[str, FinishEvent]:
    events: list[Event] = [event async for event in engine.generate(ask)]
    finish = events.pop()
    assert isinstance(finish, FinishEvent)
    assert all(isinstance(event, TextEvent) and event.text for event in events)
    return "".join(event.text for event in events if isinstance(event, TextEvent)), finish


async def settled(engine: SequentialEngine) -> None:
    """Wait until the engine has nothing left to do."""
    async with asyncio.timeout(5):
        while (stats := engine.stats()).running or stats.waiting:  # noqa: ASYNC110 - other thread
            await asyncio.sleep(0.001)
    assert engine.stats().kv_used_bytes == 0


async def test_answer_ends_at_the_end_of_turn_token() -> None:
    async with running(FakeStepModel()) as engine:
        text, finish = await collect(engine, request())
        assert text == "Hello there."
        assert finish.reason == "stop"
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 13)


async def test_answer_ends_at_max_tokens() -> None:
    async with running(FakeStepModel()) as engine:
        text, finish = await collect(engine, request(max_tokens=5))
        assert (text, finish.reason, finish.usage.completion_tokens) == ("Hello", "length", 5)


async def test_answer_ends_at_the_context_window() -> None:
    async with running(FakeStepModel()) as engine:
        text, finish = await collect(engine, request(prompt=WINDOW - 2))
        assert (text, finish.reason) == ("He", "length")


async def test_answer_ends_before_a_stop_string() -> None:
    async with running(FakeStepModel()) as engine:
        text, finish = await collect(engine, request(stop=("zzz", "o th")))
        assert (text, finish.reason) == ("Hell", "stop")
        assert finish.usage.completion_tokens == 8  # up to the one that completed it


async def test_stop_string_that_completes_with_the_last_token_is_a_stop() -> None:
    async with running(FakeStepModel()) as engine:
        assert (await collect(engine, request(max_tokens=5, stop=("lo",))))[1].reason == "stop"


async def test_half_a_stop_string_at_the_end_is_text() -> None:
    async with running(FakeStepModel()) as engine:
        assert (await collect(engine, request(stop=("re.!",))))[0] == "Hello there."


async def test_characters_are_never_split() -> None:
    reply = "你好, 世界 🌍!"
    async with running(FakeStepModel(reply.encode())) as engine:
        events = [event async for event in engine.generate(request())]
        texts = [event.text for event in events if isinstance(event, TextEvent)]
        assert texts == list(reply)


async def test_a_character_cut_by_the_limit_is_left_out() -> None:
    async with running(FakeStepModel("你好".encode())) as engine:
        assert (await collect(engine, request(max_tokens=4)))[0] == "你"


async def test_long_prompts_are_prefilled_in_chunks() -> None:
    model = FakeStepModel(b"")
    async with running(model) as engine:
        await collect(engine, request(prompt=2 * PREFILL_CHUNK + 7))
    assert model.chunks == [PREFILL_CHUNK, PREFILL_CHUNK, 7]


async def test_requests_are_served_in_order_of_arrival() -> None:
    model = FakeStepModel()
    order: list[str] = []

    async def ask(name: str) -> None:
        await collect(engine, request(name=name))
        order.append(name)

    async with running(model) as engine:
        gate = Gate(model)
        tasks = []
        for name in "abc":
            tasks.append(asyncio.create_task(ask(name)))
            await asyncio.sleep(0)
        await gate.until_reached()
        assert (engine.stats().running, engine.stats().waiting) == (1, 2)
        gate.open(1000)
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c"]


async def test_more_than_the_waiting_list_holds_is_refused_at_once() -> None:
    model = FakeStepModel()
    async with running(model, max_waiting=2) as engine:
        gate = Gate(model)
        tasks = [asyncio.create_task(collect(engine, request())) for _ in range(3)]
        await gate.until_reached()
        with pytest.raises(OverloadedError) as refusal:
            await collect(engine, request())
        assert (refusal.value.status, refusal.value.code) == (503, "queue_full")
        gate.open(1000)
        await asyncio.gather(*tasks)
        assert engine.stats().requests_total == 3


async def test_a_free_engine_takes_one_more_than_may_wait() -> None:
    model = FakeStepModel()
    async with running(model, max_waiting=1) as engine:
        gate = Gate(model)
        tasks = [asyncio.create_task(collect(engine, request())) for _ in range(2)]
        await asyncio.sleep(0)  # both are in before the worker can have taken the first
        gate.open(1000)
        await asyncio.gather(*tasks)


async def test_cancelling_a_waiting_request_takes_it_off_the_list() -> None:
    model = FakeStepModel()
    async with running(model) as engine:
        gate = Gate(model)
        first = asyncio.create_task(collect(engine, request()))
        await gate.until_reached()
        second = asyncio.create_task(collect(engine, request()))
        await asyncio.sleep(0)
        assert engine.stats().waiting == 1
        second.cancel()
        await asyncio.wait({second})
        assert (engine.stats().waiting, engine.stats().cancelled_total) == (0, 1)
        gate.open(1000)
        assert (await first)[0] == "Hello there."


async def test_cancelling_during_prefill_stops_at_the_next_chunk() -> None:
    model = FakeStepModel()
    async with running(model) as engine:
        gate = Gate(model)
        task = asyncio.create_task(collect(engine, request(prompt=5 * PREFILL_CHUNK)))
        gate.open()
        await gate.until_reached()
        await gate.until_reached()  # in the second chunk
        task.cancel()
        await asyncio.wait({task})
        gate.open()
        await settled(engine)
        assert model.chunks == [PREFILL_CHUNK, PREFILL_CHUNK]
        assert engine.stats().cancelled_total == 1


async def test_closing_the_iterator_stops_the_generation() -> None:
    model = FakeStepModel(b"x" * 1500)
    async with running(model) as engine:
        gate = Gate(model)
        gate.open(3)
        async with aclosing(engine.generate(request(max_tokens=1500))) as events:
            async for _ in events:
                break
        gate.open(1500)
        await settled(engine)
        assert engine.stats().cancelled_total == 1
        assert engine.stats().generated_tokens_total <= 3


async def test_a_failed_step_fails_only_its_request() -> None:
    model = FakeStepModel()
    async with running(model) as engine:

        def fail_once() -> None:
            model.before_forward = lambda: None
            raise ZeroDivisionError

        model.before_forward = fail_once
        with pytest.raises(EngineFailureError, match="ZeroDivisionError"):
            await collect(engine, request())
        assert (await collect(engine, request()))[0] == "Hello there."
        stats = engine.stats()
        assert (stats.failed_total, stats.requests_total, stats.running) == (1, 2, 0)


async def test_engine_is_free_when_the_finish_event_arrives() -> None:
    async with running(FakeStepModel()) as engine:
        for _ in range(30):
            await collect(engine, request())
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.kv_used_bytes) == (0, 0, 0)


async def test_stats_show_what_runs() -> None:
    model = FakeStepModel()
    async with running(model) as engine:
        gate = Gate(model)
        task = asyncio.create_task(collect(engine, request()))
        gate.open(2)
        for _ in range(3):
            await gate.until_reached()
        stats = engine.stats()
        assert (stats.model, stats.running, stats.details) == ("fake", 1, {"kind": "fake"})
        assert (stats.kv_used_bytes, stats.kv_total_bytes) == (40, WINDOW * 10)
        gate.open(100)
        await task
        assert engine.stats().generated_tokens_total == 13
        assert engine.stats().tokens_per_second == 1.3


async def test_close_ends_what_runs_and_refuses_what_waits() -> None:
    model = FakeStepModel()
    async with running(model) as engine:
        gate = Gate(model)
        tasks = [asyncio.create_task(collect(engine, request())) for _ in range(3)]
        await gate.until_reached()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        gate.open(1)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await closing
        assert {getattr(result, "code", None) for result in results} == {"draining"}
        with pytest.raises(OverloadedError):
            await collect(engine, request())
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.cancelled_total) == (0, 0, 3)


async def test_close_before_start_does_nothing() -> None:
    await SequentialEngine(model="m", load=FakeStepModel, tokenizer=ByteTokenizer()).close()


async def test_load_failures_become_model_errors() -> None:
    def load() -> FakeStepModel:
        raise KeyError("config")

    engine = SequentialEngine(model="m", load=load, tokenizer=ByteTokenizer())
    with pytest.raises(ModelError, match="cannot load m: KeyError: 'config'"):
        await engine.start()
    await engine.close()


async def test_model_errors_of_the_loader_keep_their_sentence() -> None:
    def load() -> FakeStepModel:
        raise ModelError("do this")

    engine = SequentialEngine(model="m", load=load, tokenizer=ByteTokenizer())
    with pytest.raises(ModelError, match=r"^do this$"):
        await engine.start()
    await engine.close()


async def test_reader_whose_loop_is_gone_does_not_hurt_the_engine() -> None:
    model = FakeStepModel()
    async with running(model) as engine:
        gate = Gate(model)

        def ask_and_vanish() -> None:
            loop = asyncio.new_event_loop()
            events = engine.generate(request())

            async def first() -> None:
                await anext(events)

            task = loop.create_task(first())
            loop.call_later(0.05, loop.stop)
            loop.run_forever()
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            loop.close()

        await asyncio.to_thread(ask_and_vanish)
        gate.open(1000)
        assert (await collect(engine, request()))[0] == "Hello there."


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_leaks_under_random_arrivals_cancels_and_failures(seed: int) -> None:
    rng = random.Random(seed)
    model = FakeStepModel(b"0123456789" * 3)
    endings = {"finished": 0, "cancelled": 0, "failed": 0, "refused": 0}

    def sometimes_fail() -> None:
        if rng.random() < 0.005:
            raise RuntimeError("a step broke")

    async def client(engine: SequentialEngine) -> None:
        ask = request(prompt=rng.randint(1, 700), max_tokens=rng.randint(1, 40))
        patience = rng.choice([None, None, 0, 0.001, 0.01])
        try:
            async with asyncio.timeout(patience):
                await collect(engine, ask)
            endings["finished"] += 1
        except TimeoutError:
            endings["cancelled"] += 1
        except ApiError as error:
            endings["refused" if error.code == "queue_full" else "failed"] += 1

    async with running(model, max_waiting=10) as engine:
        model.before_forward = sometimes_fail
        clients = []
        for _ in range(150):
            clients.append(asyncio.create_task(client(engine)))
            await asyncio.sleep(rng.choice([0, 0, 0, 0.002]))
        await asyncio.gather(*clients)
        await settled(engine)
        stats = engine.stats()
        assert sum(endings.values()) == 150
        assert stats.failed_total >= endings["failed"]  # one may fail after its client has left
        assert stats.requests_total <= 150 - endings["refused"]
        ended = endings["finished"] + stats.cancelled_total + stats.failed_total
        # A request can also finish in the very moment in which its client gives up.
        assert 0 <= stats.requests_total - ended <= endings["cancelled"]
