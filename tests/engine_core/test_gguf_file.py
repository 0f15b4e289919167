"""The lean GGUF reader against the `gguf` package, and against damaged files."""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.errors import ModelError
from engine_core.gguf_file import TENSOR_BLOCKS, read_gguf
from engine_core.models import ModelFiles


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    theirs = {
        kind.value: (kind.name, block, size)
        for kind, (block, size) in gguf.GGML_QUANT_SIZES.items()
    }

    assert {kind: theirs[kind] for kind in TENSOR_BLOCKS} == TENSOR_BLOCKS


def test_metadata_and_tensor_places_equal_the_gguf_packages_reading(
    write_gguf: Callable[..., Path],
) -> None:
    values = {
        "a.bool": True,
        "a.text": "snow ☃",
        "a.texts": ["a", "", "ü"],
        "a.floats": [0.5, -1.5],
        "a.ints": [1, 2, 3],
    }
    rng = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": rng.normal(size=(32, 64)).astype(np.float32),
        "odd": np.arange(7, dtype=np.float16),
    }
    path = write_gguf(values, tensors=tensors)

    file = read_gguf(path)

    for key, value in values.items():
        assert file.metadata[key] == value
    for theirs in gguf.GGUFReader(path).tensors:
        ours = file.tensors[theirs.name]
        assert ours.offset == theirs.data_offset
        assert ours.nbytes == theirs.n_bytes
        assert ours.shape == tuple(reversed([int(extent) for extent in theirs.shape]))


def test_the_builtin_model_reads_whole(builtin_files: ModelFiles) -> None:
    file = read_gguf(builtin_files.path)

    last = max(file.tensors.values(), key=lambda info: info.offset)
    assert last.offset + last.nbytes == builtin_files.path.stat().st_size
    assert len(file.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152


def test_a_file_shorter_than_its_tensors_is_called_cut_off(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    path.write_bytes(path.read_bytes()[:-40])

    with pytest.raises(ModelError, match=r"cut off.*Download or copy it again"):
        read_gguf(path)


def test_another_kind_of_file_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 not a model")

    with pytest.raises(ModelError, match="not a GGUF file"):
        read_gguf(path)


def test_an_unreadable_version_says_how_to_convert(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))

    with pytest.raises(ModelError, match="big-endian"):
        read_gguf(path)


def test_a_part_of_a_split_model_says_how_to_join(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf({"split.count": 3})

    with pytest.raises(ModelError, match="llama-gguf-split --merge"):
        read_gguf(path)


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(struct.pack("<QIIQ", 1, 9, 8, 2**40), id="texts"),
        pytest.param(struct.pack("<QIIQ", 1, 9, 4, 2**62), id="integers"),
        pytest.param(struct.pack("<Q", 2**63), id="key"),
    ],
)
def test_absurd_lengths_are_refused_at_once(tmp_path: Path, claim: bytes) -> None:
    head, key = b"GGUF" + struct.pack("<IQQ", 3, 0, 1), b""
    if len(claim) > 8:
        key, claim = claim[:8] + b"k", claim[8:]
    path = tmp_path / "m.gguf"
    path.write_bytes(head + key + claim)

    with pytest.raises(ModelError, match="damaged"):
        read_gguf(path)


def test_a_tensor_type_from_the_future_says_what_to_use(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    content = write_gguf().read_bytes()
    name = b"token_embd.weight"
    kind = content.index(name) + len(name) + 4 + 2 * 8
    (tmp_path / "m.gguf").write_bytes(content[:kind] + b"\xfe" + content[kind + 1 :])

    with pytest.raises(ModelError, match=r"type 254, which is not known.*Q8_0"):
        read_gguf(tmp_path / "m.gguf")


def test_an_absent_file_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        read_gguf(tmp_path / "none.gguf")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.data())
def test_no_damage_raises_anything_but_a_model_error(
    tmp_path: Path, write_gguf: Callable[..., Path], data: st.DataObject
) -> None:
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_gguf({"a.texts": ["a", "b"], "a.ints": [1, 2]})
    whole = path.read_bytes()
    head = len(whole) - 32 * 64 * 4
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(bytes(broken)[: data.draw(st.integers(0, len(whole)))])

    with suppress(ModelError):
        read_gguf(damaged)
