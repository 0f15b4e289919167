"""Steps in graphs give what eager steps give; what cannot be captured is computed without."""

from typing import Any

import pytest
from fake_capture import FakeCapture
from runner_steps import open_runner, three_generated

from cloud_engine.graphs import bucket_sizes

pytestmark = pytest.mark.usefixtures("one_thread")


def test_graphs_give_the_tokens_of_eager_steps(llama: Any, undisturbed: list[list[int]]) -> None:
    runner = open_runner(llama, capture=FakeCapture())
    before = runner.details
    assert before["graphs"] == "on"
    assert before["graph_buckets"] == " ".join(map(str, bucket_sizes(64)))
    assert three_generated(runner) == undisturbed
    after = runner.details
    assert after["eager_steps_total"] == before["eager_steps_total"]
    assert int(after["graph_hits_4"]) > 40  # of three sequences
    assert int(after["graph_padded_tokens_total"]) > 40


def test_a_graph_that_fails_is_left_out_and_the_next_one_serves(
    llama: Any, undisturbed: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    third = len(bucket_sizes(64)) - 3  # the largest go first
    runner = open_runner(llama, capture=FakeCapture({third: RuntimeError("no such kernel")}))
    assert "no graph for steps of 4 tokens: RuntimeError: no such kernel" in caplog.text
    assert str(runner.details["graph_buckets"]).split()[:3] == ["1", "2", "8"]
    assert three_generated(runner) == undisturbed
    assert int(runner.details["graph_hits_8"]) > 40


def test_steps_beyond_the_graphs_that_there_are_run_eagerly(
    llama: Any, undisturbed: list[list[int]]
) -> None:
    runner = open_runner(llama, capture=FakeCapture({0: RuntimeError("out of memory")}))
    before = int(runner.details["eager_steps_total"])
    assert three_generated(runner) == undisturbed
    assert int(runner.details["eager_steps_total"]) == before + 1  # the first step is of 64 tokens


def test_without_any_graph_every_step_is_eager_and_stats_say_why(
    llama: Any, undisturbed: list[list[int]]
) -> None:
    failures = dict.fromkeys(range(len(bucket_sizes(64))), RuntimeError("not on this device"))
    runner = open_runner(llama, capture=FakeCapture(failures))
    assert runner.details["graphs"] == "off: RuntimeError: not on this device"
    assert runner.details["graph_buckets"] == ""
    assert three_generated(runner) == undisturbed


def test_graphs_that_are_not_wanted_are_not_captured(llama: Any) -> None:
    runner = open_runner(llama, capture=FakeCapture(), graphs=False)
    assert str(runner.details["graphs"]).startswith("off")
