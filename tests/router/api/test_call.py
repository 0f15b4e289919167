"""A request is read once, and reaches a target with only the model's name changed."""

import json

import pytest

from router.api.call import CHAT, COMPLETIONS, Route


@pytest.mark.parametrize(
    ("route", "body", "choices"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}, 1),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 3}, 3),
        (COMPLETIONS, {"prompt": "a"}, 1),
        (COMPLETIONS, {"prompt": [5, 6, 7]}, 1),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
    ],
)
def test_it_knows_how_many_answers_the_client_waits_for(
    route: Route, body: dict[str, object], choices: int
) -> None:
    assert route.read(json.dumps({"model": "auto", **body}).encode()).choices == choices


def test_only_the_model_is_changed() -> None:
    body = {"model": "auto", "prompt": "中", "stream": True, "seed": 1}
    call = COMPLETIONS.read(json.dumps(body).encode())
    assert call.stream
    assert json.loads(call.body_for("m")) == {**body, "model": "m"}
