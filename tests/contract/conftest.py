"""Every engine there is, as a real process. The suite in this folder must pass on each."""

from collections.abc import Iterator

import pytest
from engine_kinds import CONTEXT, KINDS, Kind
from engine_process import EngineProcess, engine_process


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(kind, id=name, marks=() if kind.is_fake else pytest.mark.slow)
        for name, kind in KINDS.items()
    ],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Return one kind of engine after the other."""
    value: Kind = request.param
    return value


@pytest.fixture(scope="session")
def engine(kind: Kind) -> Iterator[EngineProcess]:
    """Return a ready engine that all tests of its kind share."""
    with engine_process(kind.module, *kind.options, "--context", str(CONTEXT)) as process:
        process.wait_until_ready()
        yield process
