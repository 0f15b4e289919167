"""What a first start needs is fetched and built while a person watches; nothing twice."""

import subprocess
from typing import Any

import pytest

from engine_core.errors import ModelError
from router import prepare
from router.config import Config, TargetConfig


class FakeStore:
    """Knows which models are here and notes what is pulled."""

    here: set[str]
    pulled: list[str]

    def find(self, name: str) -> None:
        if name not in self.here:
            raise ModelError(f"{name} is not here")

    def pull(self, name: str) -> None:
        self.pulled.append(name)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the models whose edge graphs were built."""
    found: list[str] = []

    def build(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        found.append(command[-1])
        return subprocess.CompletedProcess(command, 1 if command[-1] == "broken" else 0)

    monkeypatch.setattr(FakeStore, "here", {"old"}, raising=False)
    monkeypatch.setattr(FakeStore, "pulled", [], raising=False)
    monkeypatch.setattr(prepare, "ModelStore", FakeStore)
    monkeypatch.setattr(prepare.subprocess, "run", build)
    return found


def config(**models: str) -> Config:
    targets = {
        name: TargetConfig(tier="edge", engine=name.rstrip("2"), model=model)  # type: ignore[arg-type]
        for name, model in models.items()
    }
    targets["remote"] = TargetConfig(tier="cloud", url="https://a.example/v1", model="theirs")
    return Config(targets=targets)


def test_a_model_that_two_engines_share_is_pulled_and_built_once(built: list[str]) -> None:
    prepare.fetch_models(config(edge="new", edge2="new", cloud="new"))
    assert FakeStore.pulled == ["new"]
    assert built == ["new"]


def test_what_is_here_is_left_alone_and_the_cloud_builds_nothing(built: list[str]) -> None:
    prepare.fetch_models(config(edge="old", cloud="big", fake="none"))
    assert FakeStore.pulled == ["big"]
    assert built == []


def test_a_failed_build_stops_the_start(built: list[str]) -> None:
    with pytest.raises(ModelError, match="broken"):
        prepare.fetch_models(config(edge="broken"))
    assert built == ["broken"]
