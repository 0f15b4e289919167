"""Steps of many sequences: each gets what it would get by itself, whatever goes on around it."""

from typing import Any

import numpy as np
import pytest
from runner_steps import (
    BLOCK_BYTES,
    HOT,
    SMALLEST,
    Steps,
    assert_as_by_itself,
    open_runner,
    plain_logits,
    random_ids,
    three_runs,
)
from tiny_models import TINY, random_model

from cloud_engine.packed_model import PackedModel
from cloud_engine.runner import Runner, RunnerOptions
from engine_core.errors import ModelError
from engine_core.types import TokenDraw

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", TINY),
    "qwen2": ("qwen2", TINY),
    "qwen3": ("qwen3", TINY),
    # Fewer tokens than a block has, so that whatever sees too much or too little shows.
    "mistral": ("mistral", TINY | {"sliding_window": 11}),
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", FAMILIES)
def test_random_arrivals_get_the_logits_that_they_have_alone(name: str) -> None:
    family, config = FAMILIES[name]
    model = random_model(family, **config)
    rng = np.random.default_rng(9)
    steps = Steps(open_runner(model))
    runs = []
    for index in range(14):
        runs.append(
            steps.add(random_ids(int(rng.integers(1, 100)), index), int(rng.integers(1, 28)))
        )
        for _ in range(rng.integers(0, 4)):
            steps.step()
    steps.run()
    for run in runs:
        assert_as_by_itself(model, run)
    assert any(1 in sizes and max(sizes) > 8 for sizes in steps.sizes)  # both in one step


@pytest.mark.parametrize("chunks", [(40,), (1,) * 40, (17, 1, 1, 20, 1)], ids=str)
def test_logits_do_not_depend_on_the_chunks_that_a_prompt_comes_in(
    llama: Any, chunks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(open_runner(llama))
    run = steps.add(random_ids(40))
    for chunk in chunks:
        monkeypatch.setattr(steps.scheduler, "_chunk", chunk)
        monkeypatch.setattr(steps.scheduler, "_quiet_budget", chunk)
        steps.step()
    assert [sum(sizes) for sizes in steps.sizes] == list(chunks)
    assert_as_by_itself(llama, run)


def test_a_prefix_that_is_in_place_gives_the_logits_of_one_that_is_not(llama: Any) -> None:
    steps = Steps(open_runner(llama))
    first = steps.add(random_ids(50), 4, salt="a")
    steps.run()
    hit = steps.add(random_ids(70), 4, salt="a")
    other = steps.add(random_ids(70), 4, salt="b")
    steps.run()
    assert (first.sequence.cached, hit.sequence.cached, other.sequence.cached) == (0, 48, 0)
    assert_as_by_itself(llama, hit)
    assert hit.sequence.tokens == other.sequence.tokens
    np.testing.assert_allclose(np.array(hit.logits), np.array(other.logits), rtol=0, atol=1e-4)


def test_what_was_generated_is_found_by_the_next_turn(llama: Any) -> None:
    steps = Steps(open_runner(llama))
    first = steps.add(random_ids(40), 30)
    steps.run()
    second = steps.add([*first.sequence.tokens, *random_ids(9, 5)], 3)
    steps.run()
    assert second.sequence.cached == 64  # the last token that was drawn was never computed
    assert_as_by_itself(llama, second)


def test_who_makes_room_and_begins_anew_gets_the_same_tokens(
    llama: Any, undisturbed: list[list[int]]
) -> None:
    steps = Steps(open_runner(llama, kv_memory=SMALLEST + 4 * BLOCK_BYTES))
    runs = three_runs(steps)
    steps.run()
    assert steps.scheduler.preempted_total
    assert [run.generated for run in runs] == undisturbed
    assert_as_by_itself(llama, runs[2])


def test_a_draw_depends_on_the_seed_and_not_on_the_company(
    llama: Any, undisturbed: list[list[int]]
) -> None:
    steps = Steps(open_runner(llama))
    steps.add(random_ids(90, 8), 5)
    other_seed = steps.add(random_ids(37, 2), 60, draw=TokenDraw(HOT, 12))
    steps.step()
    same = steps.add(random_ids(37, 2), 60, draw=TokenDraw(HOT, 2**63 + 11))
    steps.run()
    assert same.generated == undisturbed[1]
    assert other_seed.generated != undisturbed[1]


def test_temperature_zero_draws_the_likeliest_token(llama: Any) -> None:
    steps = Steps(open_runner(llama))
    drawn = steps.add(random_ids(30), 20, draw=TokenDraw(0.0, 0))
    beside = steps.add(random_ids(30), 20, draw=TokenDraw(HOT, 5))
    by_host = steps.add(random_ids(30), 20)
    steps.run()
    assert drawn.generated == by_host.generated != beside.generated
    assert drawn.logits == []
    likeliest = plain_logits(llama, drawn.sequence.tokens)[29:-1].argmax(axis=1)
    assert drawn.generated == likeliest.tolist()


def test_where_no_number_is_largest_the_host_gets_the_logits(llama: Any) -> None:
    steps = Steps(open_runner(llama))
    steps.runner._model._model.model.embed_tokens.weight.data[5] = float("nan")
    broken = steps.add([1, 2, 5], 1, draw=TokenDraw(0.0, 0))
    sound = steps.add([1, 2, 3], 1, draw=TokenDraw(0.0, 0))
    steps.run()
    assert np.isnan(broken.logits[0]).all()
    assert sound.logits == []


def test_context_is_the_models_own_or_a_smaller_one(llama: Any) -> None:
    assert open_runner(llama).context_window == 128
    assert open_runner(llama, context=16).context_window == 16
    with pytest.raises(ModelError, match="a context of 129 tokens is more than"):
        open_runner(llama, context=129)
    with pytest.raises(ModelError, match="raise kv_memory"):
        open_runner(llama, context=128, kv_memory=SMALLEST - BLOCK_BYTES)
    assert open_runner(llama, kv_memory=SMALLEST - BLOCK_BYTES).context_window == 112


def test_a_model_that_does_not_know_its_longest_context_needs_one(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedModel, "longest", lambda _: None)
    with pytest.raises(ModelError, match="set a context"):
        open_runner(llama)
    assert open_runner(llama, context=64).context_window == 64


def test_a_model_that_keeps_to_itself_where_its_tokens_belong_is_refused() -> None:
    model = random_model("llama", **TINY)
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def without_step(*args: Any, packed: Any = None, **rest: Any) -> Any:  # noqa: ARG001
        return forward(*args, **rest)

    attention.forward = without_step
    with pytest.raises(ModelError, match=r"LlamaAttention does not pass on .* a 'url' target"):
        Runner(PackedModel(model), RunnerOptions())


def test_a_model_whose_tokens_look_at_their_neighbours_in_the_stream_is_refused() -> None:
    model = random_model("llama", **TINY)
    # A convolution over places, say, that transformers keeps in no cache of ours.
    model.model.embed_tokens.register_forward_hook(
        lambda _module, _inputs, output: output + output.roll(1, dims=1)
    )
    with pytest.raises(ModelError, match=r"computes something else .* name that server as a 'url'"):
        Runner(PackedModel(model), RunnerOptions())
