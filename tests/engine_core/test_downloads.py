"""What downloads and builds share: durable moves and plain words for a full disk."""

import errno
import os
from pathlib import Path

import pytest

from engine_core.downloads import plain_disk_errors, replace_durably
from engine_core.errors import ModelError


def test_a_folder_is_on_the_disk_with_all_its_files_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "new", tmp_path / "models" / "m"
    (source / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (source / name).write_text(name)
    synced: list[tuple[int, bool]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, target.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    replace_durably(source, target)

    assert (target / "inner" / "b").read_text() == "inner/b"
    before = {inode for inode, moved in synced if not moved}
    assert before == {path.stat().st_ino for path in (target, *target.rglob("*"))}
    assert synced[-1] == (target.parent.stat().st_ino, True)


@pytest.mark.parametrize(
    ("needed", "words"), [(None, "nothing more fits in"), (2_000_000, "the model needs 2 MB in")]
)
def test_a_full_disk_is_said_with_what_is_known(
    tmp_path: Path, needed: int | None, words: str
) -> None:
    with (
        pytest.raises(ModelError, match=f"The disk is full: {words}"),
        plain_disk_errors(tmp_path, needed),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
