"""The whole of Tidegate: a real daemon, two real engines, the real model, real clients."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest
from daemon_process import DaemonProcess, daemon

from engine_core.models import BUILTIN, ModelFiles

pytestmark = pytest.mark.slow

TARGETS = f"""
  edge: {{tier: edge, engine: edge, model: '{BUILTIN}', threads: 2}}
  cloud: {{tier: cloud, engine: cloud, model: '{BUILTIN}', threads: 2}}
"""
EASY = "What is the capital of France?"
HARD = (
    "Prove that there are infinitely many primes congruent to 3 modulo 4, then explain step by "
    "step why the same argument fails for primes congruent to 1 modulo 4."
)
CHINESE = "中国的首都是哪里？"  # noqa: RUF001 - that is how one asks


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, builtin_files: ModelFiles
) -> Iterator[DaemonProcess]:
    assert builtin_files.path.exists()
    with daemon(tmp_path_factory.mktemp("e2e"), TARGETS) as process:
        process.wait_ready()
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


@pytest.fixture
def client(run: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{run.url}/v1", api_key="unused", max_retries=0, timeout=120
    ) as made:
        yield made


def question(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "auto", "temperature": 0, "max_tokens": 24, "messages": messages, **more}


def test_an_easy_question_is_answered_by_the_edge(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**question(EASY))
    assert raw.headers["x-tidegate-tier"] == "edge"
    assert raw.headers["x-tidegate-rule"] == "easy"
    answer = raw.parse()
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_hard_one_is_answered_by_the_cloud(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**question(HARD))
    assert raw.headers["x-tidegate-tier"] == "cloud"
    assert raw.headers["x-tidegate-rule"] == "hard"
    assert raw.parse().choices[0].message.content


@pytest.mark.parametrize("model", ["edge", "cloud"])
def test_streamed_and_whole_answers_are_the_same_text(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(**question(EASY, model=model))
    stream = client.chat.completions.create(
        **question(EASY, model=model), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert finishes[-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    # The second time, more of the prompt may be cached.
    assert chunks[-1].usage.to_dict() | {"prompt_tokens_details": None} == (
        whole.usage.to_dict() | {"prompt_tokens_details": None}
    )


def test_plain_completions_are_answered(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="edge", prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in answer.choices[0].text


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**question(EASY, model="gpt-9"))
    assert caught.value.code == "model_not_found"


def test_models_can_be_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["auto", "edge", "cloud"]


def test_chinese_streams_without_a_broken_character_to_the_same_tier(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**question(CHINESE), stream=True)
    assert raw.headers["x-tidegate-tier"] == "edge"
    text = "".join(c.choices[0].delta.content or "" for c in raw.parse())
    assert text
    assert "\ufffd" not in text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("tier", "module"), [("edge", "edge_engine"), ("cloud", "cloud_engine")])
async def test_a_client_that_hangs_up_stops_the_engine_within_a_second(
    run: DaemonProcess, tier: str, module: str, stream: bool
) -> None:
    body = question("Count from one to a thousand.", model=tier, max_tokens=1500, stream=stream)
    async with engine_session(run, module) as engine:
        async with aiohttp.ClientSession() as session:
            url = f"{run.url}/v1/chat/completions"
            asking = asyncio.create_task(read_all(session, url, body))
            await until_running(engine, 1)
            asking.cancel()
            await asyncio.wait({asking})
        hung_up = time.monotonic()
        await until_running(engine, 0)
        assert time.monotonic() - hung_up < 1
    assert run.metric('tidegate_requests_total{outcome="client_closed"') >= 1


async def read_all(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as response:
        await response.read()


def engine_session(run: DaemonProcess, module: str) -> aiohttp.ClientSession:
    """Return a session that talks to an engine behind the daemon's back."""
    command = run.engine(module).cmdline()
    socket = command[command.index("--uds") + 1]
    return aiohttp.ClientSession("http://engine", connector=aiohttp.UnixConnector(socket))


async def until_running(engine: aiohttp.ClientSession, count: int) -> None:
    async with asyncio.timeout(30):
        while True:
            async with engine.get("/engine/stats") as response:
                stats = await response.json()
            if stats["running"] + stats["waiting"] == count:
                return
            await asyncio.sleep(0.02)


def test_a_killed_cloud_engine_is_covered_by_the_edge_and_comes_back(
    run: DaemonProcess, client: openai.OpenAI
) -> None:
    restarts = run.metric("tidegate_engine_restarts_total")
    tiers = []
    for number in range(10):
        if number == 2:
            run.engine("cloud_engine").kill()
        # The client raises if it meets a connection error; it retries nothing.
        raw = client.chat.completions.with_raw_response.create(**question(HARD, max_tokens=4))
        assert raw.parse().choices[0].message.content
        tiers.append(raw.headers["x-tidegate-tier"])
    assert tiers[:2] == ["cloud", "cloud"]
    assert "edge" in tiers
    run.wait_ready("cloud", seconds=60)
    raw = client.chat.completions.with_raw_response.create(**question(HARD, max_tokens=4))
    assert raw.headers["x-tidegate-tier"] == "cloud"
    assert run.metric("tidegate_engine_restarts_total") == restarts + 1


async def test_a_stream_under_way_on_a_killed_engine_ends_with_an_error_others_move(
    run: DaemonProcess,
) -> None:
    body = question(HARD, max_tokens=1500, stream=True)
    async with aiohttp.ClientSession() as session:
        url = f"{run.url}/v1/chat/completions"
        async with session.post(url, json=body) as response:
            assert response.headers["x-tidegate-tier"] == "cloud"
            await response.content.readany()
            # One at a time in the engine: this one waits behind the stream, uncommitted.
            waiting = asyncio.create_task(session.post(url, json=question(HARD, max_tokens=4)))
            async with engine_session(run, "cloud_engine") as engine:
                await until_running(engine, 2)
            run.engine("cloud_engine").kill()
            rest = await response.read()
        assert b'"upstream_error"' in rest
        assert b"[DONE]" not in rest
        moved = await waiting
        assert moved.status == 200
        assert moved.headers["x-tidegate-tier"] == "edge"
        assert moved.headers["x-tidegate-failover"] == "cloud:upstream_error"
        assert (await moved.json())["choices"][0]["message"]["content"]
    assert run.metric('tidegate_failovers_total{from_target="cloud"') >= 1
    await asyncio.to_thread(run.wait_ready, "cloud", seconds=60)


def test_a_killed_daemon_leaves_no_engine(tmp_path: Path, builtin_files: ModelFiles) -> None:
    assert builtin_files.path.exists()
    with daemon(tmp_path, TARGETS) as run:
        run.wait_ready("edge")  # the cloud engine may still be loading: it must go too
        engines = run.engines()
        assert len(engines) == 2
        run.process.kill()
        _, alive = psutil.wait_procs(engines, timeout=10)
        assert alive == []


def test_sigterm_lets_a_real_stream_finish(tmp_path: Path, builtin_files: ModelFiles) -> None:
    assert builtin_files.path.exists()
    edge_only = TARGETS.strip("\n").splitlines()[0]
    with daemon(tmp_path, edge_only) as run:
        run.wait_ready()
        with openai.OpenAI(base_url=f"{run.url}/v1", api_key="unused", max_retries=0) as client:
            stream = client.chat.completions.create(
                **question("Count to one hundred.", max_tokens=120), stream=True
            )
            first = next(iter(stream))
            run.process.terminate()
            rest = list(stream)
        assert first.choices
        assert rest[-1].choices[0].finish_reason in ("stop", "length")
        assert run.process.wait(15) == 0
