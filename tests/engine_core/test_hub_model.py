"""Models from the hub, over a real HTTP server that speaks the hub's API.

The client runs in a process of its own, because huggingface_hub reads HF_ENDPOINT once, at import.
"""

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.numpy import save

from engine_core.models import ModelStore

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import sys
from engine_core.errors import ModelError
from engine_core.models import ModelStore
try:
    print(ModelStore().pull(sys.argv[1]).path)
except ModelError as error:
    sys.exit(f"ModelError: {error}")
"""


def model_files() -> dict[str, bytes]:
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "model.safetensors": save({"a": np.arange(50_000, dtype=np.float32)}),
        "consolidated.safetensors": b"the same weights again",
        "pytorch_model.bin": b"pickle",
        "onnx/model.onnx": b"graph",
        "README.md": b"# model",
    }


@dataclass
class FakeHub:
    """One public repository, `org/model`, and what the test makes go wrong with it."""

    files: dict[str, bytes] = field(default_factory=model_files)
    lfs_sha256: str | None = None
    claimed_size: int | None = None
    hang_up_after: int | None = None
    downloads: list[str] = field(default_factory=list)
    requests: int = 0
    url: str = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/models/{org}/{name}", self.info)
        app.router.add_get("/api/models/{org}/{name}/revision/{revision}", self.info)
        # How huggingface_hub lists files from its 2.x on.
        app.router.add_get("/api/models/{org}/{name}/tree/{revision}", self.tree)
        # HEAD comes along with GET in aiohttp.
        app.router.add_get("/{org}/{name}/resolve/{revision}/{file:.*}", self.file)
        return app

    async def info(self, request: web.Request) -> web.Response:
        self.requests += 1
        if request.match_info["name"] == "gated":
            return web.json_response({}, status=403, headers={"X-Error-Code": "GatedRepo"})
        if request.match_info["name"] != "model":
            return web.json_response({}, status=404, headers={"X-Error-Code": "RepoNotFound"})
        if request.match_info.get("revision", "main") not in ("main", "v1", COMMIT):
            return web.json_response({}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = [
            {
                "rfilename": name,
                "size": self.claimed_size or len(content),
                "blobId": hashlib.sha1(content, usedforsecurity=False).hexdigest(),
                **({"lfs": self.lfs(content)} if name.endswith(".safetensors") else {}),
            }
            for name, content in self.files.items()
        ]
        return web.json_response({"id": "org/model", "sha": COMMIT, "siblings": siblings})

    async def tree(self, _request: web.Request) -> web.Response:
        self.requests += 1
        entries = [
            {
                "type": "file",
                "path": name,
                "size": self.claimed_size or len(content),
                "oid": hashlib.sha1(content, usedforsecurity=False).hexdigest(),
                **({"lfs": self.lfs(content)} if name.endswith(".safetensors") else {}),
            }
            for name, content in self.files.items()
        ]
        return web.json_response(entries)

    def lfs(self, content: bytes) -> dict[str, object]:
        sha256 = self.lfs_sha256 or hashlib.sha256(content).hexdigest()
        return {"sha256": sha256, "oid": sha256, "size": len(content), "pointerSize": 100}

    async def file(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        name = request.match_info["file"]
        content = self.files[name]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(content))})
        self.downloads.append(f"{name} {request.headers.get('Range', 'whole')}")
        start = request.http_range.start or 0
        part = content[start:]
        response = web.StreamResponse(status=206 if start else 200, headers=headers)
        response.content_length = len(part)
        await response.prepare(request)
        if self.hang_up_after is not None and len(part) > self.hang_up_after:
            await response.write(part[: self.hang_up_after])
            await asyncio.sleep(0.1)
            transport = request.transport
            assert transport is not None
            transport.close()
            return response
        await response.write(part)
        return response


@pytest.fixture
async def hub() -> AsyncIterator[FakeHub]:
    hub = FakeHub()
    async with TestServer(hub.app()) as server:
        hub.url = str(server.make_url(""))
        yield hub


async def pull(root: Path, name: str, endpoint: str, **environment: str) -> tuple[int, str, str]:
    """Pull in a new process; return exit code, stdout and stderr."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT, name),
        env={
            **inherited,
            "CACHE_DIRECTORY": str(root),
            "HF_HOME": str(root / "hf"),
            "HF_ENDPOINT": endpoint.rstrip("/"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            **environment,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode().strip(), err.decode()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_a_model_arrives_whole_and_is_found_without_a_network(
    hub: FakeHub, tmp_path: Path
) -> None:
    code, out, err = await pull(tmp_path, "org/model", hub.url)

    assert (code, err.count("Downloading org/model")) == (0, 1), err
    path = Path(out)
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert names_in(path) == {*wanted, ".tidegate.json"}
    assert {name.split()[0] for name in hub.downloads} == wanted
    asked = hub.requests
    files = ModelStore(tmp_path).find("org/model")
    assert (files.label, files.format, files.digest) == ("model", "safetensors", COMMIT)
    code, out, _ = await pull(tmp_path, "org/model", hub.url)
    assert (code, out, hub.requests) == (0, str(path), asked)


async def test_a_revision_lies_beside_the_default(hub: FakeHub, tmp_path: Path) -> None:
    code, out, err = await pull(tmp_path, "org/model@v1", hub.url)

    assert code == 0, err
    assert Path(out).name == "org--model@v1"


async def test_a_file_that_is_gone_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    _, out, _ = await pull(tmp_path, "org/model", hub.url)
    (Path(out) / "tokenizer.json").unlink()

    code, _, err = await pull(tmp_path, "org/model", hub.url)

    assert code == 0, err
    assert (Path(out) / "tokenizer.json").is_file()


async def test_changed_weights_are_thrown_away(hub: FakeHub, tmp_path: Path) -> None:
    hub.lfs_sha256 = "0" * 64

    code, _, err = await pull(tmp_path, "org/model", hub.url)

    assert code == 1
    assert "model.safetensors did not arrive as the hub describes it" in err
    assert list((tmp_path / "models" / "hub").iterdir()) == []


async def test_an_interrupted_download_goes_on_where_it_stopped(
    hub: FakeHub, tmp_path: Path
) -> None:
    # huggingface_hub writes in pieces of 10 MB; less than one is lost at an interruption.
    hub.files["model.safetensors"] = save({"a": np.zeros(6_000_000, np.float32)})
    hub.hang_up_after = 15_000_000

    code, _, err = await pull(tmp_path, "org/model", hub.url)

    assert code == 1
    assert "the next pull goes on from there" in err
    hub.hang_up_after, hub.downloads = None, []
    code, _, err = await pull(tmp_path, "org/model", hub.url)
    assert code == 0, err
    assert "model.safetensors bytes=10485760-" in hub.downloads


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/mistyped", "check the spelling"),
        ("org/gated", "accept its terms"),
        ("org/model@v9", "no revision 'v9'"),
    ],
)
async def test_what_the_hub_refuses_is_explained(
    hub: FakeHub, tmp_path: Path, name: str, words: str
) -> None:
    code, _, err = await pull(tmp_path, name, hub.url)

    assert code == 1
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("missing", "words"),
    [("model.safetensors", "no *.safetensors"), ("tokenizer.json", "no tokenizer.json")],
)
async def test_what_cannot_be_served_is_refused_before_the_download(
    hub: FakeHub, tmp_path: Path, missing: str, words: str
) -> None:
    del hub.files[missing]

    code, _, err = await pull(tmp_path, "org/model", hub.url)

    assert code == 1
    assert words in err
    assert hub.downloads == []


async def test_without_a_network_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    code, _, err = await pull(tmp_path, "org/model", "http://127.0.0.1:1")

    assert code == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("ModelError: org/model could not be downloaded")
    assert "copy the model's folder" in last


async def test_offline_mode_is_respected(tmp_path: Path) -> None:
    code, _, err = await pull(tmp_path, "org/model", "http://127.0.0.1:1", HF_HUB_OFFLINE="1")

    assert code == 1
    assert "HF_HUB_OFFLINE forbids" in err


async def test_a_model_larger_than_the_disk_is_refused_before_the_download(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.claimed_size = 10**18

    code, _, err = await pull(tmp_path, "org/model", hub.url)

    assert code == 1
    assert "The disk is full" in err
    assert hub.downloads == []
    assert list((tmp_path / "models" / "hub").iterdir()) == []
