"""Engine sockets lie in a private folder that goes away."""

from pathlib import Path

import pytest

from engine_core.errors import TidegateError
from router.targets.socket_folder import socket_folder, socket_path


@pytest.mark.parametrize("variable", ["RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"])
def test_it_lies_where_the_system_says_and_is_private(tmp_path: Path, variable: str) -> None:
    with socket_folder({variable: str(tmp_path)}) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        socket_path(folder, 0).touch()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_base_is_said_with_what_to_set(tmp_path: Path) -> None:
    with (
        pytest.raises(TidegateError, match="XDG_RUNTIME_DIR"),
        socket_folder({"XDG_RUNTIME_DIR": str(tmp_path / "none")}),
    ):
        pass


def test_a_path_too_long_for_a_socket_is_refused_and_nothing_left(tmp_path: Path) -> None:
    base = tmp_path / ("x" * 100)
    base.mkdir()
    with (
        pytest.raises(TidegateError, match="too long"),
        socket_folder({"XDG_RUNTIME_DIR": str(base)}),
    ):
        pass
    assert list(base.iterdir()) == []
