"""What a start needs is fetched and built while a person watches."""

from typing import Any

import pytest

from engine_core.errors import ModelError
from router import prepare
from router.config import Config, TargetConfig


class FakeStore:
    """Has every model but one as soon as it is pulled."""

    def __init__(self) -> None:
        self.pulled: list[str] = []

    def pull(self, name: str) -> None:
        self.pulled.append(name)
        if name == "wrong":
            raise ModelError("wrong is no model")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    made = FakeStore()
    monkeypatch.setattr(prepare, "ModelStore", lambda: made)
    return made


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the models that the builder was asked for."""
    models: list[str] = []

    def fake_build(model: str, **_: Any) -> int:
        models.append(model)
        return 2 if model == "broken" else 0

    monkeypatch.setattr(prepare, "run_build", fake_build)
    return models


def config(**models: str) -> Config:
    targets = {
        name: TargetConfig(tier="edge", engine=name.rstrip("2"), model=model)  # type: ignore[arg-type]
        for name, model in models.items()
    }
    targets["remote"] = TargetConfig(tier="cloud", url="https://a.example/v1", model="theirs")
    return Config(targets=targets)


def test_an_edge_model_is_built_once_and_only_child_engines_models_are_fetched(
    store: FakeStore, built: list[str]
) -> None:
    prepare.prepare_models(config(edge="m", edge2="m", cloud="m", cloud2="big", fake="none"))
    assert built == ["m"]
    assert store.pulled == ["big"]


def test_what_cannot_be_had_is_said_and_does_not_keep_the_others_from_starting(
    store: FakeStore, built: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare.prepare_models(config(edge="broken", edge2="m", cloud="wrong", cloud2="big"))
    assert built == ["broken", "m"]
    assert store.pulled == ["wrong", "big"]
    assert capsys.readouterr().err == "error: wrong is no model\n"
