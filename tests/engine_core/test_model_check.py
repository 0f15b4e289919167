"""Damaged and incomplete model files are told apart before anything loads them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine_core.errors import ModelError
from engine_core.model_check import (
    check_folder,
    check_gguf,
    digest_of,
    read_json,
    safetensors_files,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a": np.ones((4, 8), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_whole_folder_passes(folder: Path) -> None:
    check_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()

    with pytest.raises(ModelError, match=rf"has no {name}.*save_pretrained"):
        check_folder(folder)


def test_pickle_weights_are_refused_with_the_reason(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"can run code; save the model again"):
        check_folder(folder)


@pytest.mark.parametrize("size", [0, 4, 20, -1])
def test_weights_that_are_cut_off_are_refused(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(ModelError, match=r"model\.safetensors is cut off.*again"):
        check_folder(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {}}',
        b"\xff" * 4,
        b"[" * 99_999,
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": 3, "shape": [0], "data_offsets": [0, 0]}}',
    ],
)
def test_a_header_that_is_none_is_damage(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(ModelError, match="damaged"):
        check_folder(folder)


def test_an_index_names_the_weight_files(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    (folder / "model.safetensors").rename(folder / "one.safetensors")

    assert [path.name for path in safetensors_files(folder)] == [
        "one.safetensors",
        "two.safetensors",
    ]
    with pytest.raises(ModelError, match=r"two\.safetensors cannot be read"):
        check_folder(folder)


@pytest.mark.parametrize("weight_map", [3, ["a"], {"a": 3}, {"a": ["x"]}])
def test_an_index_that_names_no_files_is_damage(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        check_folder(folder)


def test_an_index_cannot_point_outside_its_folder(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../../secret.safetensors"}})
    )

    with pytest.raises(ModelError, match="outside its folder"):
        check_folder(folder)


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no folder"):
        check_folder(tmp_path / "none")
    with pytest.raises(ModelError, match="There is no file"):
        check_gguf(tmp_path / "none.gguf")


def test_a_gguf_file_is_checked_to_its_end(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    check_gguf(path)
    os.truncate(path, path.stat().st_size - 1)

    with pytest.raises(ModelError, match="cut off"):
        check_gguf(path)


def test_the_digest_changes_with_any_file(folder: Path) -> None:
    before = digest_of(folder)

    assert digest_of(folder) == before
    os.utime(folder / "config.json", ns=(0, 0))
    assert digest_of(folder) != before


def test_the_digest_of_a_single_file_is_its_own(folder: Path) -> None:
    (folder / "m.gguf").write_bytes(b"x")
    before = digest_of(folder / "m.gguf")
    (folder / "other").write_bytes(b"y")

    assert digest_of(folder / "m.gguf") == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "cannot be read"), ("[]", "JSON object"), ("[" * 99_999, "cannot be read")],
)
def test_broken_json_is_named(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(content)

    with pytest.raises(ModelError, match=rf"config\.json .*{reason}"):
        read_json(tmp_path / "config.json")
