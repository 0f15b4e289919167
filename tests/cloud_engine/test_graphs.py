import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_capture import FakeCapture
from tiny_models import TINY
from transformers import LlamaConfig, LlamaForCausalLM

from cloud_engine.attention import ATTENTION, REFERENCE, PackedStep
from cloud_engine.graphs import BUCKETS, StepGraphs, bucket_sizes
from cloud_engine.sampling import draw
from cloud_engine.step_inputs import InputRow, InputViews, StepInputs
from engine_core.types import TokenDraw

BLOCK_SIZE = 4
ROWS = 8
WIDTH = 8
SIZES = (1, 2, 4, 8, 16)
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


class Outputs(NamedTuple):
    logits: torch.Tensor
    tokens: torch.Tensor


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # or attention would hardly matter
    model.set_attn_implementation(ATTENTION)
    return model


class Steps:
    """A tiny Llama over blocks that have something in them, and rows for it."""

    def __init__(self, model: Any, make_inputs: type[StepInputs] = StepInputs) -> None:
        self._model = model
        self.random = np.random.default_rng(11)
        blocks = ROWS * WIDTH + 1
        self.table = np.zeros((ROWS + 1, WIDTH), np.int32)
        self.table[:ROWS] = self.random.permutation(blocks - 1).reshape(ROWS, WIDTH) + 1
        self.tables = torch.from_numpy(self.table)
        torch.manual_seed(6)
        shape = (blocks, BLOCK_SIZE, TINY["num_key_value_heads"], TINY["head_dim"])
        layers = range(TINY["num_hidden_layers"])
        self.keys = [torch.randn(shape) for _ in layers]
        self.values = [torch.randn(shape) for _ in layers]
        self.inputs = make_inputs(64, self.table, BLOCK_SIZE, CPU)
        self.sizes: list[int] = []
        self._samples = 0

    @torch.inference_mode()
    def forward(self, size: int) -> Outputs:
        self.sizes.append(size)
        return self.compute(self.inputs.view(size))

    def compute(self, views: InputViews) -> Outputs:
        packed = PackedStep(
            views.slots.long(),
            views.contexts,
            views.table_rows,
            self.tables,
            self.keys,
            self.values,
            REFERENCE,
        )
        logits = self._model(
            input_ids=views.tokens,
            position_ids=views.positions,
            use_cache=False,
            logits_to_keep=views.logit_rows,
            packed=packed,
        ).logits[0]
        return Outputs(logits, draw(logits, views.temperatures, views.seeds, views.counters))

    def sample(self, tokens: int) -> list[InputRow]:
        """Return rows whose pasts and draws are other ones each time."""
        self._samples += 1
        rows = []
        for number, place in enumerate(self.random.permutation(ROWS)):
            ahead = ROWS - number - 1
            length = tokens if not ahead else int(self.random.integers(0, tokens // 2 + 2))
            ids = [int(i) for i in self.random.integers(0, TINY["vocab_size"], min(tokens, length))]
            tokens -= len(ids)
            if ids:
                # Greedy, or so hot that the noise draws: what is stale shows in the tokens.
                hot = (number + self._samples) % 2
                how = TokenDraw(50.0 * hot, int(self.random.integers(0, 2**62)))
                rows.append(InputRow(int(place), self._samples % 12 + 1, ids, True, how))
        return rows

    def eager(self, rows: Sequence[InputRow]) -> Outputs:
        """Return what a step gives without graphs, for the rows that there are."""
        tokens = sum(len(row.tokens) for row in rows)
        self.inputs.fill(rows, tokens)
        outputs = self.forward(tokens)
        return Outputs(*(output[: len(rows)].clone() for output in outputs))


def captured(
    steps: Steps, capture: FakeCapture | None = None, sizes: Sequence[int] = SIZES
) -> StepGraphs[Outputs]:
    graphs = StepGraphs(steps.inputs, steps.forward)
    graphs.capture_all(sizes, capture or FakeCapture(), steps.sample)
    return graphs


def run_all(graphs: StepGraphs[Outputs], steps: Steps) -> Iterator[tuple[Outputs, Outputs]]:
    """Yield what graphs and eager steps give for steps of all sizes, in a mixed order."""
    for tokens in steps.random.permutation(range(1, SIZES[-1] + 1)):
        rows = steps.sample(int(tokens))
        expected = steps.eager(rows)
        outputs = graphs.run(rows)
        assert outputs is not None
        yield Outputs(*(output[: len(rows)] for output in outputs)), expected


def assert_same(found: Outputs, expected: Outputs) -> None:
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.tokens, expected.tokens)


def test_graphs_give_what_eager_steps_give_in_any_order_of_sizes(model: Any) -> None:
    steps = Steps(model)
    graphs = captured(steps)
    assert graphs.sizes == SIZES
    for found, expected in run_all(graphs, steps):
        assert_same(found, expected)


def test_a_replay_runs_nothing_of_the_model_in_python(model: Any) -> None:
    steps = Steps(model)
    graphs = captured(steps)
    rows = steps.sample(6)
    before = len(steps.sizes)
    assert graphs.run(rows) is not None
    assert len(steps.sizes) == before


def test_the_largest_graph_is_captured_first(model: Any) -> None:
    steps = Steps(model)
    captured(steps)
    firsts = [size for size in dict.fromkeys(steps.sizes) if size in SIZES]
    assert firsts[0] == 16
    assert steps.sizes.index(8) < steps.sizes.index(1)


def test_a_step_goes_to_the_smallest_graph_that_it_fits_and_all_is_counted(model: Any) -> None:
    steps = Steps(model)
    graphs = captured(steps)
    for tokens in (1, 3, 4, 9, 17, 17):
        outputs = graphs.run(steps.sample(tokens))
        assert (outputs is None) == (tokens == 17)
    assert graphs.stats() == {
        "graphs": "on",
        "graph_buckets": "1 2 4 8 16",
        "graph_hits_1": 1,
        "graph_hits_2": 0,
        "graph_hits_4": 2,
        "graph_hits_8": 0,
        "graph_hits_16": 1,
        "graph_padded_tokens_total": 1 + 7,
        "eager_steps_total": 2,
    }


def test_without_captures_all_steps_are_eager_and_stats_say_why(model: Any) -> None:
    steps = Steps(model)
    graphs = StepGraphs(steps.inputs, steps.forward, off="the device is a CPU")
    assert graphs.run(steps.sample(1)) is None
    assert graphs.stats() == {
        "graphs": "off: the device is a CPU",
        "graph_buckets": "",
        "graph_padded_tokens_total": 0,
        "eager_steps_total": 1,
    }


@pytest.mark.parametrize("failed", [0, 2, len(SIZES) - 1])
def test_a_failed_capture_costs_its_size_alone(
    model: Any, failed: int, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(model)
    capture = FakeCapture({failed: torch.OutOfMemoryError("the fake has no memory")})
    with caplog.at_level(logging.WARNING):
        graphs = captured(steps, capture)
    lost = SIZES[::-1][failed]
    assert graphs.sizes == tuple(size for size in SIZES if size != lost)
    assert [record.message for record in caplog.records] == [
        f"no graph for steps of {lost} tokens: OutOfMemoryError: the fake has no memory"
    ]
    assert (graphs.run(steps.sample(lost)) is None) == (lost == SIZES[-1])
    for tokens in set(SIZES) - {lost}:
        rows = steps.sample(tokens)
        expected = steps.eager(rows)
        outputs = graphs.run(rows)
        assert outputs is not None
        assert_same(Outputs(*(output[: len(rows)] for output in outputs)), expected)


def test_if_all_captures_fail_all_steps_are_eager(model: Any) -> None:
    steps = Steps(model)
    failures = dict.fromkeys(range(len(SIZES)), RuntimeError("the fake never captures"))
    graphs = captured(steps, FakeCapture(failures))
    assert graphs.sizes == ()
    assert graphs.run(steps.sample(1)) is None
    assert graphs.stats()["graphs"] == "off: RuntimeError: the fake never captures"


def test_a_model_that_reads_on_the_host_is_left_eager(model: Any) -> None:
    class Reading(Steps):
        def compute(self, views: InputViews) -> Outputs:
            if views.contexts.max() > 1000:  # as rotary embeddings that grow with the sequence do
                raise AssertionError
            return super().compute(views)

    graphs = captured(Reading(model))
    assert graphs.sizes == ()
    assert "not permitted" in str(graphs.stats()["graphs"])


# What follows breaks a step in one way each and sees that no graph of it is let through.


@pytest.mark.parametrize("name", InputViews._fields)
def test_an_input_that_is_not_copied_in_is_caught(model: Any, name: str) -> None:
    class Fresh(StepInputs):
        """One of the views is made anew at each step, which only Python notices."""

        def fill(self, rows: Sequence[InputRow], size: int) -> None:
            super().fill(rows, size)
            self.fresh = getattr(super().view(size), name).clone()

        def view(self, size: int) -> InputViews:
            return super().view(size)._replace(**{name: self.fresh})

    assert captured(Steps(model, Fresh), sizes=(8, 16)).sizes == ()


def test_memory_that_has_moved_is_caught(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Moving(StepInputs):
        def fill(self, rows: Sequence[InputRow], size: int) -> None:
            self._matrix = self._twin = self._matrix.clone()
            self._host = self._twin.numpy()
            self._host_temperatures = self._host[6].view(np.float32)
            super().fill(rows, size)

    assert captured(Steps(model, Moving)).sizes == ()
    assert "something else than the eager step" in caplog.text


def test_keys_and_values_that_have_moved_since_the_capture_are_not_seen(model: Any) -> None:
    # No check can foresee it: it shows that the fake does not hide what CUDA would do.
    steps = Steps(model)
    graphs = captured(steps)
    steps.keys[:] = [torch.randn_like(keys) for keys in steps.keys]
    found, expected = next(run_all(graphs, steps))
    assert not torch.allclose(found.logits, expected.logits, atol=1e-2)


def test_a_number_that_varies_and_is_python_s_is_caught(model: Any) -> None:
    class Counting(StepInputs):
        def fill(self, rows: Sequence[InputRow], size: int) -> None:
            super().fill(rows, size)
            self.longest = max(row.begin + len(row.tokens) for row in rows)

    class Baking(Steps):
        inputs: Counting

        def compute(self, views: InputViews) -> Outputs:
            # Right in an eager step, whatever the step; a graph keeps that of its capture.
            shift = self.inputs.longest - views.contexts.max()
            return super().compute(views._replace(contexts=views.contexts + shift.int()))

    steps = Baking(model, Counting)
    first, second = [InputRow(0, 2, [5, 6], True)], [InputRow(1, 9, [7, 8], True)]
    samples = iter([first, second])
    graphs = StepGraphs(steps.inputs, steps.forward)
    graphs.capture_all([2], FakeCapture(), lambda _: next(samples))
    assert graphs.sizes == ()
    assert "something else than the eager step" in str(graphs.stats()["graphs"])


def test_padding_that_is_not_on_the_trash_block_is_caught(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Loose(StepInputs):
        def fill(self, rows: Sequence[InputRow], size: int) -> None:
            super().fill(rows, size)
            total = sum(len(row.tokens) for row in rows)
            block, inside = divmod(rows[0].begin - 1, BLOCK_SIZE)
            slot = self._table[rows[0].place, block] * BLOCK_SIZE + inside
            self._host[2, total:size] = slot

    graphs = captured(Steps(model, Loose))
    assert graphs.sizes == (1,)  # has no padding
    assert "padding changes what it computes" in caplog.text


def test_outputs_that_are_no_numbers_are_caught(model: Any) -> None:
    steps = Steps(copy.deepcopy(model))
    with torch.no_grad():
        steps._model.lm_head.weight[3] = float("nan")
    assert captured(steps).sizes == ()


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 100)),
        (256, BUCKETS),
        (2048, BUCKETS),
    ],
)
def test_sizes_go_up_to_the_largest_step_or_the_largest_graph(
    most: int, sizes: tuple[int, ...]
) -> None:
    assert bucket_sizes(most) == sizes
