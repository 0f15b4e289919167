"""An engine that serves many sequences at once, over any model that can step a mixed batch.

The model lives in one worker thread: it is loaded, stepped and freed there, so that nothing it
does holds up the event loop. Requests come in and go away through the scheduler, under a lock that
is never held during a step.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future

from engine_core.answer import Answer, Draw
from engine_core.batch_model import BatchModel, Choice, compute
from engine_core.errors import (
    ApiError,
    DeadlineError,
    EngineFailureError,
    ModelError,
    OverloadedError,
    TidegateError,
)
from engine_core.grammar import Grammar
from engine_core.meters import Ending, Meters
from engine_core.sampling import Sampler, plain_draw
from engine_core.scheduler import Scheduler, Sequence, StepRow
from engine_core.types import (
    ChatTokenizer,
    EngineStats,
    Event,
    FinishEvent,
    GenerationRequest,
)

IDLE_SECONDS = 5.0
"""Without work for so long, the model gives back what it holds for the next step."""

_log = logging.getLogger("tidegate.engine")


class _Job:
    """One accepted request."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.sequence = Sequence(
            tokens=list(request.prompt_ids),
            priority=request.priority,
            salt=request.cache_salt,
            deadline=request.deadline,
            draw=plain_draw(request),
        )
        self.loop = asyncio.get_running_loop()
        # Not bounded, but never longer than the request's max_tokens.
        self.events: asyncio.Queue[Event | ApiError] = asyncio.Queue()
        # Made by the worker when it first needs them.
        self.sampler: Sampler | None = None
        self.answer: Answer | None = None


Deliveries = list[tuple[_Job, Event | ApiError]]


class BatchEngine:
    """Serves requests side by side.

    Args:
        model: The name that answers carry.
        load: Makes the model; called once, in the worker thread.
        tokenizer: The model's tokenizer.
        max_waiting: Requests that may wait when all places are taken; more are refused.
    """

    def __init__(
        self,
        *,
        model: str,
        load: Callable[[], BatchModel],
        tokenizer: ChatTokenizer,
        max_waiting: int = 64,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.context_window = 0
        self.most_requests = 0
        self._load = load
        self._max_waiting = max_waiting
        self._meters = Meters()
        # A daemon, since a load that hangs must not keep the process from ending.
        self._worker = threading.Thread(target=self._work, name="engine", daemon=True)
        self._loaded: Future[None] = Future()
        self._gone: Future[None] = Future()
        # What both threads touch, under this lock.
        self._changed = threading.Condition()
        self._stepper: BatchModel | None = None
        self._scheduler: Scheduler | None = None
        self._jobs: dict[Sequence, _Job] = {}
        self._pressure: list[tuple[int, Future[dict[str, int]]]] = []
        self._closing = False

    async def start(self) -> None:
        """Load the model.

        Raises:
            ModelError: it cannot be loaded; says why.
        """
        self._worker.start()
        await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Yield the request's events; see `engine_core.types.Engine`."""
        job = _Job(request)
        self._accept(job)
        try:
            while True:
                event = await job.events.get()
                if isinstance(event, ApiError):
                    raise event
                yield event
                if isinstance(event, FinishEvent):
                    return
        finally:
            self._settle([job], "cancelled")

    def stats(self) -> EngineStats:
        """Return a reading."""
        with self._changed:
            model, scheduler = self._stepper, self._scheduler
            running, waiting = (scheduler.running, scheduler.waiting) if scheduler else (0, 0)
            computed = scheduler.computed_tokens if scheduler else 0
            preempted = scheduler.preempted_total if scheduler else 0
            # Under the lock too, since the worker frees a model once nobody can find it here.
            kv_total = model.kv_total_bytes if model else 0
            memory, details = (model.memory(), model.details) if model else ({}, {})
        return self._meters.read(
            model=self.model,
            running=running,
            waiting=waiting,
            kv_used_bytes=computed * model.kv_token_bytes if model else 0,
            kv_total_bytes=kv_total,
            preempted_total=preempted,
            memory=memory,
            details=details,
        )

    async def pressure(self, level: int) -> dict[str, int]:
        """Give memory back between two steps; see `engine_core.types.Engine`."""
        done: Future[dict[str, int]] = Future()
        with self._changed:
            if self._closing or self._stepper is None:
                raise _closing_error()
            self._pressure.append((level, done))
            self._changed.notify_all()
        # Whoever asked may be gone before the step has ended.
        return await asyncio.shield(asyncio.wrap_future(done))

    async def close(self) -> None:
        """Refuse what waits, end what runs and free the model after the present step."""
        with self._changed:
            self._closing = True
            jobs = list(self._jobs.values())
            asked, self._pressure = self._pressure, []
            self._changed.notify_all()
        self._settle(jobs, "cancelled")
        self._deliver([(job, _closing_error()) for job in jobs])
        for _, done in asked:
            done.set_exception(_closing_error())
        if self._worker.ident is not None:  # it was started
            await asyncio.shield(asyncio.wrap_future(self._gone))
            # In a moment. A thread that is in a library's code when the interpreter ends is unwound,
            # which C++ takes for an error and aborts the process.
            self._worker.join()

    def _accept(self, job: _Job) -> None:
        with self._changed:
            if self._closing or self._scheduler is None:
                raise _closing_error()
            self._scheduler.add(job.sequence)
            self._jobs[job.sequence] = job
            self._meters.accepted()
            self._changed.notify_all()

    def _settle(self, jobs: Iterable[_Job], ending: Ending, *, keep: bool = True) -> None:
        """Take jobs out, those that are still in; each ends once."""
        with self._changed:
            for job in jobs:
                if self._jobs.pop(job.sequence, None) and self._scheduler:
                    self._scheduler.leave(job.sequence, keep=keep)
                    self._meters.ended(ending)

    def _deliver(self, deliveries: Deliveries) -> None:
        """Hand events to their readers, with one call into each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, Deliveries] = {}
        for delivery in deliveries:
            by_loop.setdefault(delivery[0].loop, []).append(delivery)
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, batch)
            except RuntimeError:  # the readers' loop is closed
                self._settle([job for job, _ in batch], "cancelled")

    # What follows runs in the worker thread.

    def _work(self) -> None:
        try:
            self._live()
        finally:
            self._gone.set_result(None)

    def _live(self) -> None:
        """Load the model, run its steps, and free it; all of it is gone on return."""
        try:
            if self.tokenizer.follows_grammars:
                # The first grammar prepares the vocabulary, which holds Python up for a fifth of a
                # second: now, and not while others are being answered.
                self.tokenizer.matcher(Grammar("json_object"))
            model = self._load()
        except Exception as error:  # noqa: BLE001 - a loader's library may raise anything
            self._loaded.set_exception(_load_error(self.model, error))
        else:
            self.context_window = model.context_window
            self.most_requests = model.space.free + self._max_waiting
            with self._changed:
                self._stepper = model
                self._scheduler = Scheduler(
                    model.space,
                    max_waiting=self._max_waiting,
                    chunk=model.step_sizes.chunk,
                    budget=model.step_sizes.budget,
                    quiet_budget=model.step_sizes.quiet_budget,
                )
            self._loaded.set_result(None)
            try:
                self._run(model, self._scheduler)
            except Exception:  # noqa: BLE001 - whatever it is
                # What a step raises is caught there. This is a bug of ours, and nobody would be
                # answered any more: the process ends, and whoever has started it starts another.
                _log.critical("the engine's worker broke", exc_info=True)
                os.kill(os.getpid(), signal.SIGTERM)
            with self._changed:
                self._stepper = None
            model.close()

    def _run(self, model: BatchModel, scheduler: Scheduler) -> None:
        rested = True
        while True:
            with self._changed:
                if self._closing:
                    return
                late = [self._jobs[sequence] for sequence in scheduler.late(time.monotonic())]
                asked, self._pressure = self._pressure, []
                rows = [] if late or asked else scheduler.plan()
                woken = bool(rows or late or asked) or self._changed.wait(
                    None if rested else IDLE_SECONDS
                )
            if late:
                self._settle(late, "cancelled")
                self._deliver([(job, _late_error()) for job in late])
            for level, done in asked:
                done.set_result(self._relieve(model, level))
            if rows:
                self._step(model, scheduler, rows)
                rested = False
            elif not woken:
                self._relieve(model, 0)
                rested = True

    def _relieve(self, model: BatchModel, level: int) -> dict[str, int]:
        before = self._meters.rss_bytes()
        try:
            model.relieve(level)
        except Exception as error:  # noqa: BLE001 - whatever it raises, the engine lives on
            _log.error("giving memory back failed", exc_info=error)
        return {"before": before, "after": self._meters.rss_bytes()}

    def _step(self, model: BatchModel, scheduler: Scheduler, rows: list[StepRow]) -> None:
        """Compute one step, draw its tokens and hand them out."""
        errors: dict[Sequence, ApiError] = {}
        choices: list[tuple[StepRow, Choice]] = []
        try:
            choices, too_large = compute(model, rows)
            errors = {sequence: _too_large_error(sequence) for sequence in too_large}
        except Exception as error:  # noqa: BLE001 - whatever a step raises, the engine lives on
            _log.error("a step of %d sequences failed", len(rows), exc_info=error)
            errors = {row.sequence: _failure(error) for row in rows}
        with self._changed:
            scheduler.computed(row for row in rows if row.sequence not in errors)
            jobs = {row.sequence: self._jobs.get(row.sequence) for row in rows}
        deliveries: Deliveries = [(job, e) for s, e in errors.items() if (job := jobs[s])]
        drawn = 0
        finished: list[_Job] = []
        for row, choice in choices:
            job = jobs[row.sequence]
            if job is None:
                continue
            try:
                token, events = self._draw(job, choice)
            except ApiError as error:
                deliveries.append((job, error))
                continue
            except Exception as error:  # noqa: BLE001 - the same
                _log.error("request %s failed", job.request.id, exc_info=error)
                deliveries.append((job, _failure(error)))
                continue
            drawn += 1
            scheduler.append(row.sequence, token)
            deliveries += [(job, event) for event in events]
            if events and isinstance(events[-1], FinishEvent):
                finished.append(job)
        self._meters.generated(drawn)
        # Settled before the readers hear of it, so that they find the engine free.
        self._settle(
            [job for job, e in deliveries if isinstance(e, ApiError)], "failed", keep=False
        )
        self._settle(finished, "finished")
        self._deliver(deliveries)

    def _draw(self, job: _Job, choice: Choice) -> tuple[int, list[Event]]:
        """Draw a sequence's next token; return it and what there is to tell about it."""
        request = job.request
        if job.answer is None:
            job.answer = Answer(request, self.tokenizer, self.context_window)
            self._meters.cached(job.sequence.cached)
        if isinstance(choice, int):
            draw = Draw(choice)
        else:
            if job.sampler is None:
                job.sampler = Sampler(request, len(choice), self.tokenizer)
            draw = job.sampler.draw(choice)
        events: list[Event] = []
        if event := job.answer.push(draw):
            events.append(event)
        if reason := job.answer.finish_reason:
            events.append(FinishEvent(reason, job.answer.usage(job.sequence.cached)))
        return draw.token, events


def _put(deliveries: Deliveries) -> None:
    for job, event in deliveries:
        job.events.put_nowait(event)


def _load_error(model: str, error: Exception) -> TidegateError:
    if isinstance(error, TidegateError):
        return error
    _log.error("loading %s failed", model, exc_info=error)
    return ModelError(f"cannot load {model}: {type(error).__name__}: {error}")


def _failure(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    return EngineFailureError(
        f"The engine failed while generating ({type(error).__name__}); its log says more."
    )


def _too_large_error(sequence: Sequence) -> ApiError:
    return EngineFailureError(
        f"The engine has no memory left for a sequence of {len(sequence.tokens)} tokens; shorten "
        "the request or give the engine more memory."
    )


def _late_error() -> ApiError:
    return DeadlineError("The request's deadline has passed.")


def _closing_error() -> OverloadedError:
    return OverloadedError("The engine is stopping.", code="draining")
