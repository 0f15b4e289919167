"""The batch engine over a scripted model: order, cancellation, failures, memory, no leaks."""

import asyncio
import random
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from fake_batch_model import BUDGET, PROMPT_TOKEN, WINDOW, FakeBatchModel, Gate

from engine_core import batch_engine
from engine_core.batch_engine import BatchEngine
from engine_core.errors import (
    ApiError,
    DeadlineError,
    EngineFailureError,
    ModelError,
    OverloadedError,
    StepMemoryError,
)
from engine_core.fake_engine import ByteTokenizer
from engine_core.scheduler import StepRow
from engine_core.types import Event, FinishEvent, GenerationRequest, Sampling, TextEvent


def request(
    prompt: int = 3,
    max_tokens: int = 100,
    stop: tuple[str, ...] = (),
    name: str = "r",
    deadline: float | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        id=name,
        prompt_ids=(PROMPT_TOKEN,) * prompt,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0),
        stop=stop,
        deadline=deadline,
    )


@asynccontextmanager
async def running(model: FakeBatchModel, max_waiting: int = 64) -> AsyncIterator[BatchEngine]:
    engine = BatchEngine(
        model="fake", load=lambda: model, tokenizer=ByteTokenizer(), max_waiting=max_waiting
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
    assert model.closed
    assert len(model.threads) <= 1


async def collect(engine: BatchEngine, ask: GenerationRequest) -> tuple[str, FinishEvent]:
    events: list[Event] = [event async for event in engine.generate(ask)]
    finish = events.pop()
    assert isinstance(finish, FinishEvent)
    assert all(isinstance(event, TextEvent) and event.text for event in events)
    return "".join(event.text for event in events if isinstance(event, TextEvent)), finish


async def settled(engine: BatchEngine) -> None:
    """Wait until the engine has nothing left to do."""
    async with asyncio.timeout(5):
        while (stats := engine.stats()).running or stats.waiting:  # noqa: ASYNC110 - other thread
            await asyncio.sleep(0.001)
    assert engine.stats().kv_used_bytes == 0


async def test_answer_ends_at_the_end_of_turn_token() -> None:
    async with running(FakeBatchModel()) as engine:
        text, finish = await collect(engine, request())
        assert text == "Hello there."
        assert finish.reason == "stop"
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 13)


async def test_answer_ends_at_max_tokens() -> None:
    async with running(FakeBatchModel()) as engine:
        text, finish = await collect(engine, request(max_tokens=5))
        assert (text, finish.reason, finish.usage.completion_tokens) == ("Hello", "length", 5)


async def test_answer_ends_at_the_context_window() -> None:
    async with running(FakeBatchModel()) as engine:
        text, finish = await collect(engine, request(prompt=WINDOW - 2))
        assert (text, finish.reason) == ("He", "length")


async def test_answer_ends_before_a_stop_string() -> None:
    async with running(FakeBatchModel()) as engine:
        text, finish = await collect(engine, request(stop=("zzz", "o th")))
        assert (text, finish.reason) == ("Hell", "stop")
        assert finish.usage.completion_tokens == 8  # up to the one that completed it


async def test_stop_string_that_completes_with_the_last_token_is_a_stop() -> None:
    async with running(FakeBatchModel()) as engine:
        assert (await collect(engine, request(max_tokens=5, stop=("lo",))))[1].reason == "stop"


async def test_half_a_stop_string_at_the_end_is_text() -> None:
    async with running(FakeBatchModel()) as engine:
        assert (await collect(engine, request(stop=("re.!",))))[0] == "Hello there."


async def test_characters_are_never_split() -> None:
    reply = "你好, 世界 🌍!"
    async with running(FakeBatchModel(reply.encode())) as engine:
        events = [event async for event in engine.generate(request())]
        texts = [event.text for event in events if isinstance(event, TextEvent)]
        assert texts == list(reply)


async def test_a_character_cut_by_the_limit_is_left_out() -> None:
    async with running(FakeBatchModel("你好".encode())) as engine:
        assert (await collect(engine, request(max_tokens=4)))[0] == "你"


async def test_long_prompts_are_prefilled_in_chunks() -> None:
    model = FakeBatchModel(b"")
    async with running(model) as engine:
        await collect(engine, request(prompt=2 * BUDGET + 7))
    assert model.steps == [[BUDGET], [BUDGET], [7]]


async def test_requests_are_served_in_order_of_arrival() -> None:
    model = FakeBatchModel()
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
    model = FakeBatchModel()
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
    model = FakeBatchModel()
    async with running(model, max_waiting=1) as engine:
        assert engine.most_requests == 2
        gate = Gate(model)
        tasks = [asyncio.create_task(collect(engine, request())) for _ in range(2)]
        await asyncio.sleep(0)  # both are in before the worker can have taken the first
        gate.open(1000)
        await asyncio.gather(*tasks)


async def test_cancelling_a_waiting_request_takes_it_off_the_list() -> None:
    model = FakeBatchModel()
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
    model = FakeBatchModel()
    async with running(model) as engine:
        gate = Gate(model)
        task = asyncio.create_task(collect(engine, request(prompt=5 * BUDGET)))
        gate.open()
        await gate.until_reached()
        await gate.until_reached()  # in the second chunk
        task.cancel()
        await asyncio.wait({task})
        gate.open()
        await settled(engine)
        assert model.steps == [[BUDGET], [BUDGET]]
        assert engine.stats().cancelled_total == 1


async def test_closing_the_iterator_stops_the_generation() -> None:
    model = FakeBatchModel(b"x" * 1500)
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
    model = FakeBatchModel()
    async with running(model) as engine:

        def fail_once(_: list[StepRow]) -> None:
            model.before_step = lambda _: None
            raise ZeroDivisionError

        model.before_step = fail_once
        with pytest.raises(EngineFailureError, match="ZeroDivisionError"):
            await collect(engine, request())
        assert (await collect(engine, request()))[0] == "Hello there."
        stats = engine.stats()
        assert (stats.failed_total, stats.requests_total, stats.running) == (1, 2, 0)


async def test_engine_is_free_when_the_finish_event_arrives() -> None:
    async with running(FakeBatchModel()) as engine:
        for _ in range(30):
            await collect(engine, request())
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.kv_used_bytes) == (0, 0, 0)


async def test_stats_show_what_runs() -> None:
    model = FakeBatchModel()
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
    model = FakeBatchModel()
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


async def test_a_model_is_not_freed_while_its_stats_are_read() -> None:
    class SlowlyReadModel(FakeBatchModel):
        def memory(self) -> dict[str, int]:
            closing.start()
            closing.join(timeout=0.2)
            assert not self.closed
            return super().memory()

    async with running(SlowlyReadModel()) as engine:
        closing = threading.Thread(target=lambda: asyncio.run(engine.close()))
        assert engine.stats().details == {"kind": "fake"}
        await asyncio.to_thread(closing.join)


async def test_close_before_start_does_nothing() -> None:
    await BatchEngine(model="m", load=FakeBatchModel, tokenizer=ByteTokenizer()).close()


async def test_load_failures_become_model_errors() -> None:
    def load() -> FakeBatchModel:
        raise KeyError("config")

    engine = BatchEngine(model="m", load=load, tokenizer=ByteTokenizer())
    with pytest.raises(ModelError, match="cannot load m: KeyError: 'config'"):
        await engine.start()
    await engine.close()


async def test_model_errors_of_the_loader_keep_their_sentence() -> None:
    def load() -> FakeBatchModel:
        raise ModelError("do this")

    engine = BatchEngine(model="m", load=load, tokenizer=ByteTokenizer())
    with pytest.raises(ModelError, match=r"^do this$"):
        await engine.start()
    await engine.close()


async def test_reader_whose_loop_is_gone_does_not_hurt_the_engine() -> None:
    model = FakeBatchModel()
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
    model = FakeBatchModel(b"0123456789" * 3, slots=3, most_tokens=100)
    endings = {"finished": 0, "cancelled": 0, "failed": 0, "refused": 0}

    def sometimes_fail(_: list[StepRow]) -> None:
        if rng.random() < 0.005:
            raise RuntimeError("a step broke")

    async def client(engine: BatchEngine) -> None:
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
        model.before_step = sometimes_fail
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


async def test_sequences_share_steps_and_each_gets_its_own_answer() -> None:
    model = FakeBatchModel(slots=4)
    async with running(model) as engine:
        answers = await asyncio.gather(*(collect(engine, request(prompt=n)) for n in (1, 9, 60, 3)))
        assert {text for text, _ in answers} == {"Hello there."}
        assert [1, 1, 1, 1] in model.steps


async def test_what_an_earlier_request_left_is_not_computed_again() -> None:
    model = FakeBatchModel(slots=2)
    async with running(model) as engine:
        first = (await collect(engine, request(prompt=50)))[1]
        second = (await collect(engine, request(prompt=70)))[1]
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 50)
        assert engine.stats().cached_prompt_tokens_total == 50
        assert [20] in model.steps


async def test_a_failed_step_leaves_nothing_to_be_used_again() -> None:
    model = FakeBatchModel(slots=1)
    async with running(model) as engine:
        await collect(engine, request(prompt=50))
        gate = Gate(model)
        task = asyncio.create_task(collect(engine, request(prompt=50)))
        await gate.until_reached()

        def fail(_: list[StepRow]) -> None:
            raise ZeroDivisionError

        model.before_step = fail
        gate.open()
        with pytest.raises(EngineFailureError):
            await task
        model.before_step = lambda _: None
        assert (await collect(engine, request(prompt=50)))[1].usage.cached_tokens == 0


async def test_a_step_that_is_too_large_is_computed_in_parts() -> None:
    model = FakeBatchModel(slots=3, most_tokens=40)
    async with running(model) as engine:
        answers = await asyncio.gather(*(collect(engine, request(prompt=n)) for n in (90, 30, 64)))
        assert {text for text, _ in answers} == {"Hello there."}
        assert max(map(sum, model.steps)) <= 40


async def test_a_token_that_does_not_fit_fails_its_request_alone() -> None:
    model = FakeBatchModel(slots=2)

    def full(rows: list[StepRow]) -> None:
        if any(len(row.sequence.tokens) >= 20 for row in rows):
            raise StepMemoryError

    async with running(model) as engine:
        model.before_step = full
        fits, too_large = await asyncio.gather(
            collect(engine, request(prompt=3, max_tokens=9)),
            collect(engine, request(prompt=20)),
            return_exceptions=True,
        )
        assert not isinstance(fits, BaseException)
        assert fits[0] == "Hello the"
        assert isinstance(too_large, EngineFailureError)
        assert "no memory left for a sequence of 20 tokens" in too_large.message


async def test_a_request_that_is_late_before_it_begins_is_never_computed() -> None:
    model = FakeBatchModel()
    async with running(model) as engine:
        with pytest.raises(DeadlineError) as refusal:
            await collect(engine, request(deadline=time.monotonic()))
        assert (refusal.value.status, refusal.value.code) == (504, "deadline")
        assert model.steps == []
        await settled(engine)


async def test_a_deadline_ends_an_answer_that_has_begun() -> None:
    model = FakeBatchModel(b"x" * 1500)

    def slowly(_: list[StepRow]) -> None:
        time.sleep(0.01)

    async with running(model) as engine:
        model.before_step = slowly
        events = engine.generate(request(max_tokens=1500, deadline=time.monotonic() + 0.1))
        texts = []
        with pytest.raises(DeadlineError):
            texts += [event async for event in events]
        await settled(engine)
        assert 1 <= len(model.steps) < 50


async def test_pressure_is_passed_on_between_steps() -> None:
    model = FakeBatchModel()
    async with running(model) as engine:
        gate = Gate(model)
        task = asyncio.create_task(collect(engine, request()))
        await gate.until_reached()
        asked = asyncio.create_task(engine.pressure(3))
        await asyncio.sleep(0)
        assert model.relieved == []
        gate.open(1000)
        freed = await asked
        assert model.relieved == [3]
        assert freed["before"] > 0
        assert freed["after"] > 0
        await task


async def test_a_client_that_gives_up_on_pressure_breaks_nothing() -> None:
    model = FakeBatchModel()
    async with running(model) as engine:
        gate = Gate(model)
        task = asyncio.create_task(collect(engine, request()))
        await gate.until_reached()
        asked = asyncio.create_task(engine.pressure(3))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})
        gate.open(1000)
        async with asyncio.timeout(5):
            assert (await task)[0] == "Hello there."


async def test_memory_that_cannot_be_given_back_breaks_nothing() -> None:
    def fail(_: int) -> None:
        raise ZeroDivisionError

    model = FakeBatchModel()
    async with running(model) as engine:
        model.relieve = fail  # type: ignore[method-assign]
        async with asyncio.timeout(5):
            assert (await engine.pressure(3))["after"] > 0
            assert (await collect(engine, request()))[0] == "Hello there."


async def test_an_idle_engine_gives_memory_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_engine, "IDLE_SECONDS", 0.01)
    model = FakeBatchModel()
    async with running(model) as engine:
        await collect(engine, request())
        await asyncio.sleep(0.1)
        assert model.relieved == [0]


async def test_a_broken_draw_fails_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeBatchModel(slots=2)
    drawn = batch_engine.Sampler.draw
    calls = 0

    def draw(sampler: batch_engine.Sampler, logits: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError
        return drawn(sampler, logits)  # type: ignore[arg-type]

    monkeypatch.setattr(batch_engine.Sampler, "draw", draw)
    async with running(model) as engine:
        results = await asyncio.gather(
            *(collect(engine, request(prompt=n)) for n in (3, 4)), return_exceptions=True
        )
        broken = [result for result in results if isinstance(result, EngineFailureError)]
        assert len(broken) == 1
        assert "ZeroDivisionError" in broken[0].message
        assert engine.stats().failed_total == 1


async def test_a_bug_in_the_worker_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr(batch_engine.os, "kill", lambda _, number: signals.append(number))
    async with running(FakeBatchModel()) as engine:

        def plan(_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(batch_engine.Scheduler, "plan", plan)
        task = asyncio.create_task(collect(engine, request()))
        async with asyncio.timeout(5):
            while not signals:  # noqa: ASYNC110 - other thread
                await asyncio.sleep(0.001)
        await engine.close()
        with pytest.raises(OverloadedError):
            await task
    assert signals == [signal.SIGTERM]
