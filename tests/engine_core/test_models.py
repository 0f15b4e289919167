"""The model store: names, places, locks, removal."""

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Never

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine_core import models
from engine_core.errors import ModelError
from engine_core.models import BUILTIN, ModelFiles, ModelStore, cache_root


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    save_file({"a": np.ones(4, np.float32)}, path / "model.safetensors")
    return path


def test_the_root_is_systemds_cache_directory_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/tidegate:/var/cache/other")

    assert cache_root() == Path("/var/cache/tidegate")


def test_the_root_is_else_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert cache_root() == tmp_path / "tidegate"


@pytest.mark.parametrize("name", [BUILTIN, "org/model", "org/model@refs/pr/1"])
def test_an_absent_model_names_the_command_that_fetches_it(store: ModelStore, name: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"tidegate models pull {name}")):
        store.find(name)

    assert not store.root.exists()


@pytest.mark.parametrize("name", ["", "gpt2", "builtin:other", "a/b/c", "org/..", "a/b@"])
def test_what_is_no_name_lists_the_four_forms(store: ModelStore, name: str) -> None:
    with pytest.raises(ModelError) as caught:
        store.find(name)

    for form in (BUILTIN, "organisation/model", "safetensors", ".gguf"):
        assert form in str(caught.value)


def test_a_folder_is_a_model(store: ModelStore, folder: Path) -> None:
    files = store.find(str(folder))

    assert (files.label, files.path, files.format) == ("my-model", folder, "safetensors")
    assert store.pull(str(folder)) == files


def test_a_relative_folder_is_a_model(
    store: ModelStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)

    assert store.find("my-model").path == folder
    assert store.find("./my-model").digest == store.find(str(folder)).digest


def test_a_gguf_file_is_a_model(store: ModelStore, write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(name="Tiny.Q8_0.gguf")

    files = store.find(str(path))

    assert (files.label, files.path, files.format) == ("Tiny.Q8_0", path, "gguf")


def test_a_link_to_a_gguf_file_keeps_its_own_name(
    store: ModelStore, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """The hub's own cache links each file's name to a blob that is named by its hash."""
    blob = write_gguf().rename(tmp_path / "2f91")
    link = tmp_path / "Tiny.Q8_0.gguf"
    link.symlink_to(blob)

    files = store.find(str(link))

    assert (files.label, files.path, files.format) == ("Tiny.Q8_0", link, "gguf")


def test_the_home_of_an_unknown_user_is_named(store: ModelStore) -> None:
    with pytest.raises(ModelError, match="~no-such-user/model starts in the home of a user"):
        store.find("~no-such-user/model")


def test_a_missing_path_is_not_taken_for_a_hub_name(store: ModelStore) -> None:
    with pytest.raises(ModelError, match="There is no folder"):
        store.find("./no/model")
    with pytest.raises(ModelError, match="There is no file"):
        store.find("no/model.gguf")


def test_only_the_builtin_model_can_be_pulled_from_a_file(store: ModelStore, folder: Path) -> None:
    with pytest.raises(ModelError, match="Only builtin:"):
        store.pull(str(folder), source=folder / "config.json")


def test_a_builtin_file_of_another_length_counts_as_absent(store: ModelStore) -> None:
    place = store._place(BUILTIN)
    place.parent.mkdir(parents=True)
    place.write_bytes(b"GGUF")

    with pytest.raises(ModelError, match="not whole"):
        store.find(BUILTIN)


@pytest.mark.parametrize(
    ("name", "words"),
    [(BUILTIN, "nothing of the download is kept"), ("org/model", "what has arrived of org/model")],
)
def test_an_interrupted_pull_says_what_is_kept(
    store: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    words: str,
) -> None:
    def fake_fetch(*_: object, **__: object) -> Never:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelStore, "_fetch", fake_fetch)
    with pytest.raises(KeyboardInterrupt):
        store.pull(name)
    assert f"Interrupted: {words}" in capsys.readouterr().err


def test_leftovers_of_a_killed_pull_are_removed_by_the_next(
    store: ModelStore, tmp_path: Path
) -> None:
    stale = store.root / "tmp" / "smollm2-135m-instruct.dead"
    stale.mkdir(parents=True)
    other = store.root / "tmp" / "something-else.alive"
    other.mkdir()
    (tmp_path / "wrong.gguf").write_bytes(b"no")

    with pytest.raises(ModelError, match="Nothing was installed"):
        store.pull(BUILTIN, source=tmp_path / "wrong.gguf", progress=False)

    assert list((store.root / "tmp").iterdir()) == [other]


def files_at(path: Path, digest: str = "d") -> ModelFiles:
    return ModelFiles("n", path.stem, path, "gguf", digest)


def test_builds_differ_by_model_content_and_variant(store: ModelStore, tmp_path: Path) -> None:
    one, two = tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"

    paths = {
        store.build_path(files_at(one), "int8"),
        store.build_path(files_at(one), "fp32"),
        store.build_path(files_at(one, "other"), "int8"),
        store.build_path(files_at(two), "int8"),
    }

    assert len(paths) == 4
    for path in paths:
        assert path.parent == store.root / "builds"
        assert re.fullmatch(r"m-[0-9a-f]{6}-[0-9a-f]{12}", path.name)


def test_builds_of_fetched_models_keep_their_names_when_the_store_moves(tmp_path: Path) -> None:
    names = set()
    for root in (tmp_path / "one", tmp_path / "two"):
        store = ModelStore(root)
        names.add(store.build_path(files_at(store._place(BUILTIN)), "int8").name)

    assert len(names) == 1


def test_removing_a_local_model_removes_only_its_builds(
    store: ModelStore, folder: Path, tmp_path: Path
) -> None:
    mine = store.build_path(store.find(str(folder)), "int8")
    other = store.build_path(files_at(tmp_path / "other" / "my-model"), "int8")
    mine.mkdir(parents=True)
    other.mkdir()

    assert store.remove(str(folder)) == [mine]
    assert folder.is_dir()
    assert other.is_dir()
    assert store.remove(str(folder)) == []


def test_removing_a_hub_model_removes_what_an_interrupted_pull_left(store: ModelStore) -> None:
    hub = store.root / "models" / "hub"
    for name in ("org--m", "org--m.partial", "org--m2"):
        (hub / name).mkdir(parents=True)

    store.remove("org/m")

    assert [path.name for path in hub.iterdir()] == ["org--m2"]


def test_entries_list_models_leftovers_and_builds(store: ModelStore, tmp_path: Path) -> None:
    assert store.entries() == []
    sizes = {
        store._place(BUILTIN): 10,
        store.root / "models" / "hub" / "org--m@v1" / "model.safetensors": 20,
        store.root / "models" / "hub" / "org--n.partial" / "config.json": 30,
        store.build_path(files_at(tmp_path / "m.gguf"), "int8") / "data" / "weights": 40,
    }
    for path, size in sizes.items():
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * size)

    entries = store.entries()

    assert [(entry.kind, entry.bytes) for entry in entries] == [
        ("model", 10),
        ("model", 20),
        ("partial", 30),
        ("build", 40),
    ]
    assert [entry.name for entry in entries[:3]] == [BUILTIN, "org/m@v1", "org/n"]


def test_the_lock_is_exclusive_and_says_when_it_waits(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, said, waits = [], [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        waits.set()

    monkeypatch.setattr(models, "say", say)

    def second() -> None:
        with store.lock("a build"):
            order.append("second")

    with store.lock("a build"):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join(10)

    assert order == ["first", "second"]
    assert said == ["Waiting for another process that is busy with a build …"]


def test_different_locks_do_not_wait(store: ModelStore) -> None:
    with store.lock("one/model"), store.lock("one-model"):
        pass


def test_a_root_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with (
        pytest.raises(ModelError, match=r"cannot be written.*XDG_CACHE_HOME"),
        ModelStore(tmp_path / "file" / "store").lock("x"),
    ):
        pass


def test_a_present_builtin_model_is_found_without_reading_it(builtin_files: ModelFiles) -> None:
    start = time.perf_counter()
    ModelStore().find(BUILTIN)

    assert time.perf_counter() - start < 0.05
    assert os.fspath(builtin_files.path).endswith(".gguf")


@pytest.mark.parametrize("name", ["x" * 300, "./" + "x" * 300, "./" + "x" * 300 + ".gguf"])
def test_a_name_longer_than_a_file_name_can_be_is_told_in_one_line(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(ModelError, match=r"is not a model's name|cannot be read: File name too"):
        ModelStore(tmp_path).pull(name)


def test_a_home_of_nobody_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a user whom this machine lacks"):
        ModelStore(tmp_path).find("~nosuchuser/model")
