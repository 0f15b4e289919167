"""Child engines are started as the configuration says, without the keys of upstreams."""

import sys
from pathlib import Path

import pytest

from engine_core.ladder import Ladder
from engine_core.memory_size import MemorySize
from router import engines
from router.config import TargetConfig
from router.engines import build_command, engine_environment, serve_command


def test_every_option_of_a_cloud_engine_reaches_its_command_line() -> None:
    target = TargetConfig(
        tier="cloud", engine="cloud", model="m", context=512, threads=3, max_waiting=7,
        kv_memory=MemorySize.from_text("8GiB"), device="cpu", dtype="float32", weights="int8",
        graphs="off", ladder=Ladder.from_text("90%:100%"), max_running=9,
    )  # fmt: skip
    assert serve_command(target, Path("/run/0.sock")) == [
        sys.executable, "-m", "cloud_engine", "serve", "--model", "m", "--uds", "/run/0.sock",
        "--lifeline", "--max-waiting", "7", "--context", "512", "--threads", "3",
        "--kv-memory", "8GiB", "--device", "cpu", "--dtype", "float32", "--weights", "int8",
        "--graphs", "off", "--ladder", "90%:100%", "--max-running", "9",
    ]  # fmt: skip


def test_every_option_of_an_edge_engine_reaches_its_command_line() -> None:
    target = TargetConfig(
        tier="edge", engine="edge", model="m", slots=4, kv="int8",
        kv_memory=MemorySize.from_text("768MiB"), step_memory=MemorySize.from_text("64 MiB"),
    )  # fmt: skip
    assert serve_command(target, Path("/run/0.sock")) == [
        sys.executable, "-m", "edge_engine", "serve", "--model", "m", "--uds", "/run/0.sock",
        "--lifeline", "--max-waiting", "64", "--slots", "4", "--kv-memory", "768MiB",
        "--step-memory", "64 MiB", "--kv", "int8",
    ]  # fmt: skip


def test_an_edge_engine_gets_only_what_it_knows() -> None:
    command = serve_command(TargetConfig(tier="edge", engine="edge", model="m"), Path("s"))
    assert command[2] == "edge_engine"
    options = [word for word in command if word.startswith("--")]
    assert options == ["--model", "--uds", "--lifeline", "--max-waiting", "--kv"]


def test_an_upstream_has_no_command() -> None:
    with pytest.raises(ValueError, match="no engine"):
        serve_command(TargetConfig(tier="edge", url="http://127.0.0.1/v1", model="m"), Path("s"))


def test_the_graph_is_built_by_the_edge_engines_own_process() -> None:
    command = ["-m", "edge_engine", "build", "--lifeline", "--model", "m", "--precision"]
    assert build_command("m")[1:] == [*command, "int8", "--kv", "float32"]
    assert build_command("m", "fp32", "int8")[1:] == [*command, "fp32", "--kv", "int8"]


def test_a_builder_is_held_by_a_lifeline_and_its_exit_code_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It ends with 7 when its stdin ends; were it closed or inherited, that would be at once or never.
    code = "import select, sys; sys.exit(7 if not select.select([0], [], [], 0.2)[0] else 1)"
    monkeypatch.setattr(engines, "build_command", lambda *_: [sys.executable, "-c", code])
    assert engines.run_build("m") == 7


def test_keys_of_upstreams_are_kept_from_engines() -> None:
    targets = [
        TargetConfig(tier="cloud", url="https://a.example/v1", model="m", key_env="A_KEY"),
        TargetConfig(tier="edge", engine="edge", model="m"),
    ]
    assert engine_environment({"A_KEY": "secret", "HOME": "/h"}, targets) == {"HOME": "/h"}
