"""Steps over a packed model: blocks of keys and values, graphs where there are any, else eager."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cloud_engine.attention import PackedStep, paged_ops
from cloud_engine.cuda_capture import CudaCapture
from cloud_engine.device_memory import device_memory
from cloud_engine.graph_samples import Samples
from cloud_engine.graphs import BUCKETS, Capture, StepGraphs, bucket_sizes
from cloud_engine.host_account import HostAccount
from cloud_engine.kv import BlockSpace
from cloud_engine.kv_pool import KvPool
from cloud_engine.memory_plan import BLOCK_SIZE, BlockPlan, blocks_for, plan_blocks
from cloud_engine.packed_model import PackedModel
from cloud_engine.sampling import draw_on, greedy
from cloud_engine.span_attention import Span, Spans
from cloud_engine.step_inputs import InputRow, InputViews, StepInputs
from engine_core.batch_model import Choice, StepSizes
from engine_core.errors import ModelError, StepMemoryError
from engine_core.ladder import DEFAULT_LADDER, Ladder
from engine_core.scheduler import StepRow

_GPU_SIZES = StepSizes(chunk=64, budget=BUCKETS[-1], quiet_budget=2048)
"""A step that others wait for is as large as the largest graph. A prompt that holds up nobody comes
in by larger ones, which compute for longer than they take to launch."""
_CPU_SIZES = StepSizes(chunk=32, budget=64, quiet_budget=64)
_MOST_RUNNING = {"cuda": 64, "cpu": 8}
_LOOK_SECONDS = 0.5
"""Between two counts of the resident pages of keys and values: of 4 GiB, one takes 3 ms."""

_OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Of errors that torch has no class for: a CPU's, and that of a library's own workspace."""

_log = logging.getLogger("tidegate.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """What the operator may choose; None leaves it to the runner.

    Args:
        context: Tokens of one sequence.
        max_running: Sequences side by side.
        kv_memory: Bytes for keys and values.
        graphs: Whether steps are captured as graphs, where the device can.
        ladder: How many sequences run when others use the GPU too.
    """

    context: int | None = None
    max_running: int | None = None
    kv_memory: int | None = None
    graphs: bool = True
    ladder: Ladder = DEFAULT_LADDER


class Outputs(NamedTuple):
    """What a step computes for the rows that want logits, and for those of padding behind them."""

    logits: torch.Tensor  # [rows, vocab]
    tokens: torch.Tensor  # [rows], -1 where none was drawn


class Runner:
    """A `BatchModel` over a packed model.

    Args:
        model: What computes.
        options: What the operator chose.
        capture: What makes graphs; None for CUDA's on a GPU, and for none on a CPU.

    Raises:
        ModelError: the model computes something else in a packed stream, or what is asked for does
            not fit.
    """

    def __init__(
        self, model: PackedModel, options: RunnerOptions, *, capture: Capture | None = None
    ) -> None:
        self._model = model
        self._ladder = options.ladder
        device = model.device
        self._on_gpu = device.type == "cuda"
        self._memory = device_memory(device)
        self._ops = paged_ops(device)
        self._draw = draw_on(device)
        self.step_sizes = _GPU_SIZES if self._on_gpu else _CPU_SIZES
        self._running = options.max_running or _MOST_RUNNING[device.type]
        self.kv_token_bytes = model.token_bytes
        self._fixed = model.details() | {
            "kind": "torch",
            "attention": "triton" if self._on_gpu else "torch",
            "threads": torch.get_num_threads(),
        }
        if capture is None and self._on_gpu:
            capture = CudaCapture(device)
        capture = capture if options.graphs else None
        plan = self._plan(options, capture)
        _log.info("%s", plan)
        self.context_window = plan.context
        self.kv_total_bytes = plan.total_bytes
        self._allocate(plan.blocks, plan.context)
        if capture is not None:
            self._graphs.capture_all(
                bucket_sizes(self.step_sizes.budget), capture, Samples(self._pool, self._running)
            )
        self.space = BlockSpace(plan.blocks, BLOCK_SIZE, self._running, self._pool.table)
        self._check_against_witness()
        self._memory.planned()
        self._account = HostAccount(0 if self._on_gpu else int(self._fixed["weight_bytes"]))
        self._kv_resident = self._pool.resident_bytes()
        self._looked = 0.0

    @property
    def details(self) -> dict[str, str | int | float | bool]:
        """What only this engine has to say in stats."""
        return {
            **self._fixed,
            "max_running": self._running,
            "running_limit": self.space.limit,
            "kv_block_tokens": BLOCK_SIZE,
            "kv_blocks": self.space.used_blocks + self.space.free_blocks,
            "kv_blocks_free": self.space.free_blocks,
            "kv_blocks_cached": self.space.cached_blocks,
            "kv_blocks_evicted_total": self.space.evicted_total,
            **self._graphs.stats(),
            **self._memory.details(),
        }

    def memory(self) -> dict[str, int]:
        """Return where the process's bytes are on the host; see `HostAccount.parts`."""
        return self._account.parts(self._kv_resident)

    def step(self, rows: Sequence[StepRow]) -> list[Choice]:
        """Compute tokens; see `engine_core.batch_model.BatchModel.step`."""
        inputs = [
            InputRow(row.place, row.begin, row.tokens, row.wants_logits, row.sequence.draw)
            for row in rows
        ]
        try:
            choices = self._choices(rows, self._compute(inputs))
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._memory.release(always=True)
            tokens = sum(len(row.tokens) for row in rows)
            raise StepMemoryError(f"no memory for a step of {tokens} tokens") from None
        for row in rows:
            self.space.written(row.place, row.sequence.tokens, row.begin + len(row.tokens))
        self.space.limit = self._ladder.most(self._memory.use(), self._running)
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._look()
        return choices

    def relieve(self, level: int) -> None:
        """Give memory back; see `engine_core.types.Engine.pressure`."""
        if level >= 2:
            self._pool.release(self.space.forget())
        self._memory.release(always=level >= 1)
        self._look()

    def close(self) -> None:
        """Free the model, the graphs, and the keys and values."""
        del self._graphs, self._inputs, self._pool
        self._model.close()
        self._memory.release(always=True)

    @torch.inference_mode()
    def _compute(self, rows: Sequence[InputRow]) -> Outputs:
        self._pool.send(self.space.changed())
        outputs = self._graphs.run(rows)
        return self._eager(rows) if outputs is None else outputs

    def _eager(self, rows: Sequence[InputRow]) -> Outputs:
        tokens = sum(len(row.tokens) for row in rows)
        self._inputs.fill(rows, tokens)
        views = self._inputs.view(tokens)
        wanted = max(1, sum(row.wants_logits for row in rows))
        views = views._replace(
            logit_rows=views.logit_rows[:wanted],
            temperatures=views.temperatures[:wanted],
            seeds=views.seeds[:wanted],
            counters=views.counters[:wanted],
        )
        # Kernels that go token by token read keys and values once for each; spans read them once.
        by_spans = not self._on_gpu or tokens > BUCKETS[-1]
        spans = Spans(_spans(rows), self._pool.tables, BLOCK_SIZE) if by_spans else None
        logits = self._logits(views, spans)
        if self._on_gpu:
            return Outputs(logits, self._drawn(logits, views))
        # Noise for a whole vocabulary takes a CPU longer than the host's sampler does.
        return Outputs(logits, torch.where(views.temperatures > 0, -1, greedy(logits)))

    @torch.inference_mode()
    def _captured(self, size: int) -> Outputs:
        """Compute the first tokens of the inputs, reading nothing on the host."""
        views = self._inputs.view(size)
        logits = self._logits(views, None)
        return Outputs(logits, self._drawn(logits, views))

    def _logits(self, views: InputViews, spans: Spans | None) -> torch.Tensor:
        packed = PackedStep(
            slots=views.slots.long(),  # here once, and not in every layer
            contexts=views.contexts,
            table_rows=views.table_rows,
            tables=self._pool.tables,
            keys=self._pool.keys,
            values=self._pool.values,
            ops=self._ops,
            spans=spans,
        )
        return self._model.forward(views.tokens, views.positions, views.logit_rows, packed)

    def _drawn(self, logits: torch.Tensor, views: InputViews) -> torch.Tensor:
        return self._draw(logits, views.temperatures, views.seeds, views.counters)

    @torch.inference_mode()
    def _choices(self, rows: Sequence[StepRow], outputs: Outputs) -> list[Choice]:
        """Bring to the host what the rows that want logits need: a token, or the logits."""
        asked = [row for row in rows if row.wants_logits]
        # Also if nobody asked: the host must not change inputs that the device has yet to read.
        tokens = outputs.tokens.tolist()[: len(asked)]
        choices: list[Choice] = list(tokens)
        # If logits are not finite, the host's sampler says what that means.
        by_host = [
            i for i, row in enumerate(asked) if row.sequence.draw is None or choices[i] == -1
        ]
        if by_host:
            logits = outputs.logits[: len(asked)]
            if len(by_host) < len(asked):
                logits = logits[by_host]
            values = logits.float().cpu().numpy()
            for index, row_logits in zip(by_host, values, strict=True):
                choices[index] = row_logits
        return choices

    def _look(self) -> None:
        self._kv_resident = self._pool.resident_bytes()
        self._looked = time.monotonic()

    def _allocate(self, blocks: int, context: int) -> None:
        """Make the memory that steps of sequences of so many tokens read and write."""
        model, sizes = self._model, self.step_sizes
        self._pool = KvPool(
            model.layers,
            blocks=blocks,
            rows=self._running + 1,
            width=blocks_for(context),
            dtype=model.dtype,
            device=model.device,
        )
        most = max(sizes.quiet_budget, sizes.budget, self._running + sizes.chunk)
        self._inputs = StepInputs(most, self._pool.table, BLOCK_SIZE, model.device)
        off = "switched off" if self._on_gpu else "there is no GPU"
        self._graphs = StepGraphs(self._inputs, self._captured, off=off)

    @torch.inference_mode()
    def _plan(self, options: RunnerOptions, capture: Capture | None) -> BlockPlan:
        """Decide on the number of blocks, by the operator's word or by measuring what is left."""
        longest = self._model.longest() or options.context
        if longest is None:
            raise ModelError("the model does not say how long its context is; set a context")
        budget = options.kv_memory
        if budget is None:
            # On the trash block alone, which any number of tokens may use.
            context = min(longest, options.context or longest)
            self._allocate(1, context)
            largest = min(self.step_sizes.quiet_budget, context)

            def step() -> None:
                self._inputs.fill([], largest)
                span = Span(0, largest, self._running, largest)
                spans = Spans([span], self._pool.tables, BLOCK_SIZE)
                self._logits(self._inputs.view(largest), spans)

            def capture_largest() -> None:
                if capture is not None:
                    size = bucket_sizes(self.step_sizes.budget)[-1]
                    self._inputs.fill([], size)
                    # In a pool of its own: one whose graphs are all gone takes no new ones.
                    CudaCapture(self._model.device).capture(lambda: self._captured(size))

            budget = self._memory.kv_budget(step, capture_largest)
        return plan_blocks(
            budget=budget,
            block_bytes=self.kv_token_bytes * BLOCK_SIZE,
            context=options.context,
            longest=longest,
            sequences=self._running,
        )

    @torch.inference_mode()
    def _check_against_witness(self) -> None:
        """Compute a text in two steps, and see that it is what the model computes by itself."""
        tokens = self._model.witness.tokens[: self.context_window]
        placement = self.space.admit(tokens, "witness")
        if placement is None:
            raise AssertionError("an empty space has room for one sequence")
        place, middle = placement.place, 2 * len(tokens) // 3
        self._compute([InputRow(place, 0, tokens[:middle], wants_logits=False)])
        outputs = self._compute([InputRow(place, middle, tokens[middle:], wants_logits=True)])
        self.space.release(place, [], 0)
        self._model.check_against_witness(outputs.logits[0], len(tokens))


def _spans(rows: Sequence[InputRow]) -> Iterator[Span]:
    begin = 0
    for row in rows:
        end = begin + len(row.tokens)
        yield Span(begin, end, row.place, row.begin + len(row.tokens))
        begin = end


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in _OUT_OF_MEMORY
    )
