"""An engine that generates one sequence at a time, over any model that can step.

The model lives in one worker thread: it is loaded, stepped and freed there, so that nothing it
does holds up the event loop. Requests wait in arrival order in a bounded list.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_core.answer import Answer
from engine_core.errors import (
    ApiError,
    EngineFailureError,
    ModelError,
    OverloadedError,
    TidegateError,
)
from engine_core.meters import Ending, Meters
from engine_core.sampling import Sampler
from engine_core.types import (
    ChatTokenizer,
    EngineStats,
    Event,
    FinishEvent,
    GenerationRequest,
    TextEvent,
)

PREFILL_CHUNK = 128
"""Prompt tokens per step: small enough that a cancelled prefill stops well within a second."""

_log = logging.getLogger("tidegate.engine")


class StepModel(Protocol):
    """A decoder that holds one sequence. Used by one thread; the properties by any."""

    @property
    def context_window(self) -> int:
        """Most tokens of the sequence."""
        ...

    @property
    def kv_total_bytes(self) -> int:
        """Room for keys and values of a full sequence."""
        ...

    @property
    def kv_used_bytes(self) -> int:
        """What the present sequence takes of it."""
        ...

    @property
    def details(self) -> dict[str, str | int | float | bool]:
        """What only this model has to say in stats: device, precision, provider."""
        ...

    def reset(self) -> None:
        """Forget the sequence."""
        ...

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens to the sequence; return the logits after the last, shape [vocab].

        The array may be overwritten by the next call.
        """
        ...

    def close(self) -> None:
        """Free the model."""
        ...


class _Job:
    """One accepted request on its way through the engine."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        # Not bounded, but never longer than the request's max_tokens.
        self.events: asyncio.Queue[Event | ApiError] = asyncio.Queue()
        self.cancelled = False

    def put(self, event: Event | ApiError) -> None:
        """Hand an event over from the worker thread."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the reader's loop is closed
            self.cancelled = True


class SequentialEngine:
    """Serves requests one after the other.

    Args:
        model: The name that answers carry.
        load: Makes the model; called once, in the worker thread.
        tokenizer: The model's tokenizer.
        max_waiting: Requests that may wait while one runs; more are refused.
    """

    def __init__(
        self,
        *,
        model: str,
        load: Callable[[], StepModel],
        tokenizer: ChatTokenizer,
        max_waiting: int = 64,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.context_window = 0
        self._load = load
        self._max_waiting = max_waiting
        self._stepper: StepModel | None = None
        self._meters = Meters()
        # A daemon, since a load that hangs must not keep the process from ending.
        self._worker = threading.Thread(target=self._work, name="engine", daemon=True)
        self._loaded: Future[None] = Future()
        self._gone: Future[None] = Future()
        # What both threads touch, under this lock.
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
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
            self._abandon(job)

    def stats(self) -> EngineStats:
        """Return a reading."""
        with self._changed:
            running, waiting = int(self._running is not None), len(self._waiting)
        model = self._stepper
        return self._meters.read(
            model=self.model,
            running=running,
            waiting=waiting,
            kv_used_bytes=model.kv_used_bytes if model else 0,
            kv_total_bytes=model.kv_total_bytes if model else 0,
            details=model.details if model else {},
        )

    async def close(self) -> None:
        """Refuse what waits, end what runs at its next step and free the model."""
        with self._changed:
            self._closing = True
            refused = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for job in refused:
            self._meters.ended("cancelled")
            job.put(_closing_error())
        if self._worker.ident is not None:  # it was started
            await asyncio.shield(asyncio.wrap_future(self._gone))

    def _accept(self, job: _Job) -> None:
        with self._changed:
            if self._closing:
                raise _closing_error()
            # A job counts as waiting until the worker takes it, so a free worker is one more place.
            if len(self._waiting) + (self._running is not None) > self._max_waiting:
                raise OverloadedError(
                    f"{len(self._waiting)} requests are waiting already; try again later.",
                    code="queue_full",
                )
            self._waiting.append(job)
            self._meters.accepted()
            self._changed.notify_all()

    def _abandon(self, job: _Job) -> None:
        """The reader has left: take the job out of the list, or tell the worker to drop it."""
        job.cancelled = True
        with self._changed:
            if job not in self._waiting:
                return
            self._waiting.remove(job)
        self._meters.ended("cancelled")

    # What follows runs in the worker thread.

    def _work(self) -> None:
        try:
            self._stepper = model = self._load()
        except Exception as error:  # noqa: BLE001 - a loader's library may raise anything
            self._loaded.set_exception(_load_error(self.model, error))
        else:
            self.context_window = model.context_window
            self._loaded.set_result(None)
            while job := self._next():
                self._serve(model, job)
            self._stepper = None
            model.close()
        finally:
            self._gone.set_result(None)

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            self._running = None if self._closing else self._waiting.popleft()
            return self._running

    def _serve(self, model: StepModel, job: _Job) -> None:
        last: FinishEvent | ApiError
        ending: Ending
        try:
            try:
                finish = self._generate(model, job)
            finally:
                model.reset()
            ending = "finished" if finish else "cancelled"
            last = finish or _closing_error()
        except Exception as error:  # noqa: BLE001 - whatever a step raises, the engine lives on
            ending = "failed"
            last = _step_error(job.request, error)
        # Settled before the reader hears of it, so that it finds the engine free.
        with self._changed:
            self._running = None
        self._meters.ended(ending)
        job.put(last)

    def _generate(self, model: StepModel, job: _Job) -> FinishEvent | None:
        """Run the request to its end; None when it was cancelled or the engine is closing."""
        request = job.request
        prompt = request.prompt_ids
        for begin in range(0, len(prompt), PREFILL_CHUNK):
            if job.cancelled or self._closing:
                return None
            logits = model.forward(prompt[begin : begin + PREFILL_CHUNK])
        sampler = Sampler(request.sampling, prompt, len(logits))
        answer = Answer(request, self.tokenizer, model.context_window)
        while not (job.cancelled or self._closing):
            token = sampler.draw(logits)
            self._meters.generated()
            if text := answer.push(token):
                job.put(TextEvent(text))
            if reason := answer.finish_reason:
                return FinishEvent(reason, answer.usage())
            logits = model.forward((token,))
        return None


def _load_error(model: str, error: Exception) -> TidegateError:
    if isinstance(error, TidegateError):
        return error
    _log.error("loading %s failed", model, exc_info=error)
    return ModelError(f"cannot load {model}: {type(error).__name__}: {error}")


def _step_error(request: GenerationRequest, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    _log.error("request %s failed", request.id, exc_info=error)
    return EngineFailureError(
        f"The engine failed while generating ({type(error).__name__}); its log says more."
    )


def _closing_error() -> OverloadedError:
    return OverloadedError("The engine is stopping.", code="draining")
