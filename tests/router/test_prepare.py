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
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the models that the builder was asked for, and with what keys and values."""
    models: list[tuple[str, str]] = []

    def fake_build(model: str, *, kv: str, **_: Any) -> int:
        models.append((model, kv))
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
    store: FakeStore, built: list[tuple[str, str]]
) -> None:
    prepare.prepare_models(config(edge="m", edge2="m", cloud="m", cloud2="big", fake="none"))
    assert built == [("m", "float32")]
    assert store.pulled == ["big"]


def test_the_same_model_with_other_keys_and_values_is_another_build(
    store: FakeStore, built: list[tuple[str, str]]
) -> None:
    targets = {
        kv: TargetConfig(tier="edge", engine="edge", model="m", kv=kv)  # type: ignore[arg-type]
        for kv in ("float32", "int8")
    }
    prepare.prepare_models(Config(targets=targets))
    assert built == [("m", "float32"), ("m", "int8")]
    assert store.pulled == []


def test_what_cannot_be_had_is_said_and_does_not_keep_the_others_from_starting(
    store: FakeStore, built: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare.prepare_models(config(edge="broken", edge2="m", cloud="wrong", cloud2="big"))
    assert built == [("broken", "float32"), ("m", "float32")]
    assert store.pulled == ["wrong", "big"]
    assert capsys.readouterr().err == "error: wrong is no model\n"
