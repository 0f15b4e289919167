"""What a build folder says about itself: enough to run it and to notice damage."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

MANIFEST_FILE = "manifest.json"
GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"


GraphKind = Literal["gqa", "past_kv"]
Precision = Literal["int8", "fp32"]
KvPrecision = Literal["float32", "int8"]
"""NumPy's names for the numbers that keys and values are kept in."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of `manifest.json` in a build folder.

    `graph` says which step model runs it: `gqa` for graphs of our emitter, `past_kv` for exports
    that concatenate keys and values. `kv` is what keys and values are kept in. `max_position` is
    the model's own limit of tokens. `files` maps every other file of the folder to its bytes.
    """

    emitter: int
    source: str
    source_digest: str
    graph: GraphKind
    precision: Precision
    kv: KvPrecision
    ragged: bool
    max_position: int
    files: dict[str, int]


@dataclass(frozen=True, slots=True)
class Build:
    """A complete build folder and what its manifest says."""

    folder: Path
    manifest: Manifest


def file_sizes(folder: Path) -> dict[str, int]:
    """Return name and bytes of each file that a manifest of this folder must list."""
    return {
        file.name: file.stat().st_size
        for file in sorted(folder.iterdir())
        if file.name != MANIFEST_FILE
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a folder's manifest."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST_FILE).write_bytes(encoded + b"\n")


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a complete build, or None for an absent or damaged one."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=Manifest)
        return manifest if file_sizes(folder) == manifest.files else None
    except (OSError, msgspec.MsgspecError):
        return None
