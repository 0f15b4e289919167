"""What the cloud engine's tests share."""

from collections.abc import Iterator
from typing import Any

import pytest
from runner_steps import open_runner, three_generated
from tiny_models import TINY, random_model


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread: models this small take longer to share than to compute."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llama() -> Any:
    """Return a tiny random model; runners are to compute with copies of it."""
    return random_model("llama", **TINY)


@pytest.fixture(scope="session")
def undisturbed(llama: Any) -> list[list[int]]:
    """Return what `three_generated` gets from eager steps with plenty of memory."""
    return three_generated(open_runner(llama))
