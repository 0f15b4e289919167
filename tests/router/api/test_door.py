"""The door answers every request, good or bad, in OpenAI's shape and without a banner."""

import asyncio
import json
import logging
import re
from typing import Any

import pytest
from fake_targets import EASY, OpenDoor, open_door
from fake_upstream import (
    DONE,
    HELLO,
    ROLE,
    STOP,
    completion,
    event,
    fake_upstream,
    reply,
    sse,
    stay_silent,
)

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]


async def send(door: OpenDoor, method: str, path: str, **more: Any) -> tuple[int, Any]:
    async with door.session.request(method, door.url + path, **more) as response:
        assert "Server" not in response.headers
        assert response.content_type == "application/json"
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, None, None),
        (b"[]", 400, None, None),
        (b"\xff", 400, None, None),
        ({"messages": MESSAGES}, 400, "missing_required_parameter", "model"),
        ({"model": "auto", "messages": []}, 400, None, "messages"),
        ({"model": "auto", "messages": MESSAGES, "zz": 1}, 400, "unknown_parameter", "zz"),
        ({"model": "auto", "messages": MESSAGES, "temperature": 9}, 400, None, "temperature"),
        ({"model": "gpt-9", "messages": MESSAGES}, 404, "model_not_found", "model"),
        (b" " * 20_000, 413, "body_too_large", None),
    ],
)
async def test_a_bad_body_is_refused_by_name_and_counted(
    body: Any, status: int, code: str | None, param: str | None
) -> None:
    async with (
        fake_upstream(reply(completion())) as edge,
        open_door(edge=edge, max_body_bytes=16_384) as door,
    ):
        data = {"data": body, "headers": JSON} if isinstance(body, bytes) else {"json": body}
        found, answer = await send(door, "POST", CHAT, **data)
        assert found == status
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error"
        assert (answer["error"]["code"], answer["error"]["param"]) == (code, param)
        line = 'tidegate_requests_total{outcome="invalid",route="chat",target="none",tier="none"}'
        assert door.metric(line) == 1
        assert edge.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/gpt-9", 404),
    ],
)
async def test_wrong_paths_and_methods_are_json_errors(method: str, path: str, status: int) -> None:
    async with fake_upstream() as edge, open_door(edge=edge) as door:
        found, answer = await send(door, method, path)
    assert found == status
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1", "/chat/completions"])
async def test_a_path_that_is_not_offered_is_answered_with_those_that_are(path: str) -> None:
    async with fake_upstream() as edge, open_door(edge=edge) as door:
        found, answer = await send(door, "POST", path)
        assert (found, answer["error"]["code"]) == (404, "not_found")
        message = answer["error"]["message"]
        assert "does not offer this path" in message
        routes = {
            route.resource.canonical for route in door.runner.app.router.routes() if route.resource
        }
    assert set(re.findall(r"/[\w{}/]+", message)) == {r.replace(":.+", "") for r in routes}


async def test_a_chunked_body_beyond_the_limit_is_refused() -> None:
    async def drip() -> Any:
        for _ in range(10):
            yield b" " * 4096

    async with fake_upstream() as edge, open_door(edge=edge, max_body_bytes=16_384) as door:
        assert (await send(door, "POST", CHAT, data=drip(), headers=JSON))[0] == 413


async def test_compressed_bodies_are_refused_unread() -> None:
    async with fake_upstream() as edge, open_door(edge=edge) as door:
        headers = JSON | {"Content-Encoding": "gzip"}
        assert (await send(door, "POST", CHAT, data=b"\x1f\x8b", headers=headers))[0] == 415


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_what_a_web_page_can_post_unasked_is_refused(kind: str) -> None:
    body = json.dumps({"model": "auto", "messages": MESSAGES}).encode()
    async with fake_upstream() as edge, open_door(edge=edge) as door:
        headers = {"Content-Type": kind}
        status, answer = await send(door, "POST", CHAT, data=body, headers=headers)
        assert status == 415
        assert "application/json" in answer["error"]["message"]
        assert edge.requests == []


async def test_bytes_that_are_no_http_are_refused_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk\x00secret\r\n\r\n"
    async with fake_upstream() as edge, open_door(edge=edge) as door:
        host, _, port = door.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        await writer.wait_closed()
    assert "malformed HTTP" in caplog.text
    assert "secret" not in caplog.text


async def test_models_are_auto_the_tiers_and_the_targets() -> None:
    async with (
        fake_upstream() as upstream,
        open_door(edge=upstream, cloud_two=upstream) as door,
    ):
        _, models = await send(door, "GET", "/v1/models")
        assert [m["id"] for m in models["data"]] == ["auto", "edge", "cloud", "cloud_two"]
        status, model = await send(door, "GET", "/v1/models/cloud_two")
    assert status == 200
    assert model in models["data"]


async def test_plain_completions_are_routed_too() -> None:
    answer = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
    stream = event({"choices": [{"index": 0, "text": "x", "finish_reason": None}]})
    stop = event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    async with (
        fake_upstream(reply(answer), sse(stream, stop, DONE)) as edge,
        open_door(edge=edge) as door,
    ):
        body = {"model": "edge", "prompt": "hi"}
        assert await send(door, "POST", "/v1/completions", json=body) == (200, answer)
        body["stream"] = True  # type: ignore[assignment]
        async with door.session.post(door.url + "/v1/completions", json=body) as response:
            assert await response.read() == stream + stop + DONE
        assert edge.requests[0][0].startswith("POST /v1/completions ")


async def test_readiness_tells_each_targets_state() -> None:
    async with fake_upstream() as upstream, open_door(edge=upstream, cloud=upstream) as door:
        assert (await send(door, "GET", "/readyz"))[0] == 200
        for target in door.targets.values():
            target.condition.state = "down"
            target.condition.reason = "killed by SIGKILL"
        status, answer = await send(door, "GET", "/readyz")
        assert status == 503
        assert answer["targets"]["edge"] == {
            "tier": "edge", "state": "down", "reason": "killed by SIGKILL",
        }  # fmt: skip
        assert (await send(door, "GET", "/healthz"))[0] == 200


async def test_with_no_target_the_client_is_told_to_come_back() -> None:
    async with fake_upstream() as upstream, open_door(edge=upstream) as door:
        door.targets["edge"].condition.state = "starting"
        async with door.ask() as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert response.headers["x-tidegate-target"] == "none"
            error = (await response.json())["error"]
        assert error["code"] == "no_target"
        assert "edge: it is starting" in error["message"]


async def test_a_draining_door_refuses_and_closes_but_finishes_what_runs() -> None:
    async with (
        fake_upstream(sse(ROLE, HELLO, 0.3, STOP, DONE)) as edge,
        open_door(edge=edge) as door,
        door.ask(stream=True) as running,
    ):
        door.door.in_flight.draining = True
        assert (await send(door, "GET", "/readyz"))[1]["status"] == "draining"
        async with door.ask() as refused:
            assert refused.status == 503
            assert (await refused.json())["error"]["code"] == "draining"
            assert refused.headers["Connection"] == "close"
        idle = asyncio.create_task(door.door.in_flight.wait_idle())
        assert await running.read() == ROLE + HELLO + STOP + DONE
        await asyncio.wait_for(idle, 1)


async def test_a_cut_tells_waiting_and_streaming_clients_that_it_shuts_down() -> None:
    async with (
        fake_upstream(sse(ROLE, HELLO, 30.0)) as edge,
        fake_upstream(stay_silent) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
        door.ask(model="edge", stream=True) as streaming,
    ):
        waiting = asyncio.create_task(door.ask(model="cloud").__aenter__())
        await asyncio.wait_for(cloud.asked.wait(), 5)
        door.door.in_flight.draining = True
        async with door.ask(model="edge") as refused:
            assert refused.status == 503
        door.door.in_flight.cut()
        assert b'"draining"' in await streaming.read()
        response = await waiting
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "draining"
        for target, tier in (("edge", "edge"), ("cloud", "cloud"), ("none", "none")):
            labels = f'outcome="draining",route="chat",target="{target}",tier="{tier}"'
            assert door.metric(f"tidegate_requests_total{{{labels}}}") == 1


async def test_a_cut_stream_whose_client_does_not_read_is_drained_too() -> None:
    flood = event({"choices": [{"index": 0, "delta": {"content": "x" * 60_000}}]})
    async with (
        fake_upstream(sse(ROLE, *[flood] * 1000)) as edge,
        open_door(edge=edge) as door,
        door.ask(model="edge", stream=True),
    ):
        door.door.in_flight.draining = True
        await asyncio.sleep(0.3)  # by now the server's buffers are full
        door.door.in_flight.cut()
        await asyncio.sleep(0.1)
        await door.runner.cleanup()
        text = door.metrics.render().decode()
        assert 'outcome="draining"' in text
        assert 'outcome="client_closed"' not in text


async def test_a_large_body_is_parsed_off_the_loop() -> None:
    async with fake_upstream(reply(completion())) as edge, open_door(edge=edge) as door:
        text = "Please summarise. " * 20_000
        async with door.ask(text, model="edge") as response:
            assert response.status == 200


async def test_one_log_line_per_request_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tidegate.request")
    async with (
        fake_upstream(reply(completion("secret answer"))) as edge,
        open_door(edge=edge) as door,
        door.ask(EASY) as response,
    ):
        decision = response.headers["x-tidegate-decision"]
    (line,) = [r.getMessage() for r in caplog.records if r.name == "tidegate.request"]
    assert f"decision={decision} route=chat target=edge rule='easy'" in line
    assert "outcome=ok" in line
    assert "capital" not in line
    assert "secret" not in line


async def test_a_fault_of_our_own_is_a_500_without_details(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fake_upstream() as edge, open_door(edge=edge) as door:

        def broken(*_: object) -> None:
            raise RuntimeError("private detail")

        monkeypatch.setattr(door.door, "_decide", broken)
        status, answer = await send(
            door, "POST", CHAT, json={"model": "auto", "messages": MESSAGES}
        )
    assert status == 500
    assert answer["error"]["type"] == "server_error"
    assert "private" not in str(answer)


async def test_a_fault_of_our_own_in_a_stream_ends_it_with_an_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        fake_upstream(sse(ROLE, HELLO, 0.2, STOP, DONE)) as edge,
        open_door(edge=edge) as door,
        door.ask(stream=True) as response,
    ):
        await response.content.readuntil(HELLO)
        # What takes the next bytes fails.
        monkeypatch.setattr("router.targets.client._take", None)
        rest = await response.read()
        assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "internal"
        line = (
            'tidegate_requests_total{outcome="upstream_error",route="chat",'
            'target="edge",tier="edge"}'
        )
        assert door.metric(line) == 1


async def test_metrics_are_in_prometheus_text_format() -> None:
    async with (
        fake_upstream(sse(ROLE, HELLO, STOP, DONE)) as edge,
        open_door(edge=edge) as door,
    ):
        async with door.ask(stream=True) as response:
            await response.read()
        async with door.session.get(door.url + "/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = await response.text()
    assert 'tidegate_first_token_seconds_count{target="edge"} 1.0' in text
    assert "tidegate_decision_seconds_count 1.0" in text
    assert "tidegate_in_flight 0.0" in text
