"""`tidegate ask`: one question to the running daemon, streamed to the terminal."""

import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from engine_core.errors import TidegateError
from router.cli_options import config_option, prompt_text
from router.config import find_config, load_config
from router.decide.decision import AUTO
from router.targets.sse import SseFramer

SILENCE_SECONDS = 600.0
"""The daemon's own limit for a whole answer; waiting longer is waiting for nobody."""


@click.command()
@click.argument("prompt")
@click.option("--model", default=AUTO, show_default=True, help="auto, a tier or a target.")
@click.option("--url", help="Of the daemon; without it, where the configuration listens.")
@config_option
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=0.0,
    show_default=True,
    help="0 always gives the most likely answer.",
)
@click.option("--system", help="System message.")
def ask(
    *,
    prompt: str,
    model: str,
    url: str | None,
    config: Path | None,
    max_tokens: int | None,
    temperature: float,
    system: str | None,
) -> None:
    """Ask the daemon; the answer goes to stdout, who answered and why to stderr.

    PROMPT is the question; - reads it from stdin.
    """
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "temperature": temperature,
        "messages": [],
    }
    if system:
        body["messages"].append({"role": "system", "content": system})
    body["messages"].append({"role": "user", "content": prompt_text(prompt)})
    if max_tokens:
        body["max_completion_tokens"] = max_tokens
    try:
        _converse(url or _configured_url(config), body)
    except TidegateError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


def _converse(url: str, body: dict[str, Any]) -> None:
    connection = _connect(url)
    path = urlsplit(url).path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    try:
        with _plain_connection_errors(url):
            connection.request(
                "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise TidegateError(_error_text(response.read(), response.status))
        click.echo(_who(response), err=True)
        for piece in _texts(response, url):
            click.echo(piece, nl=False)
        click.echo()
    finally:
        connection.close()


@contextmanager
def _plain_connection_errors(url: str) -> Iterator[None]:
    """Explain what fails between here and the daemon. Nothing is written to the terminal inside."""
    try:
        yield
    except ConnectionRefusedError:
        raise TidegateError(
            f"no daemon answers at {url}; start one with `tidegate serve`"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise TidegateError(f"the connection to {url} broke: {error}") from None


def _configured_url(path: Path | None) -> str:
    listen = load_config(find_config(path)).listen
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"http://{host}:{listen.port}"


def _connect(url: str) -> http.client.HTTPConnection:
    wrong = TidegateError(f"{url} is no URL of a daemon; it looks like http://127.0.0.1:8080")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        return kind(parts.hostname, port, timeout=SILENCE_SECONDS)
    except http.client.InvalidURL:
        raise wrong from None


def _who(response: http.client.HTTPResponse) -> str:
    said = {
        name: response.headers.get(f"x-tidegate-{name}", "?")
        for name in ("tier", "target", "complexity", "rule", "failover")
    }
    line = "{tier} via {target}, complexity {complexity}, rule {rule}".format(**said)
    return line if said["failover"] == "?" else f"{line}, after {said['failover']}"


def _texts(response: http.client.HTTPResponse, url: str) -> Iterator[str]:
    """Yield the answer's text as it comes.

    Raises:
        TidegateError: the answer broke off.
    """
    framer = SseFramer()
    while chunk := _read(response, url):
        for event in framer.feed(chunk):
            if event.data is None:
                continue
            if event.data == b"[DONE]":
                return
            document = json.loads(event.data)
            if error := document.get("error"):
                raise TidegateError(f"the answer broke off: {error.get('message')}")
            # The daemon passes on what a provider sends: chunks without choices or delta, too.
            for choice in document.get("choices") or ():
                yield (choice.get("delta") or {}).get("content") or ""
    raise TidegateError("the answer broke off: the daemon closed the stream")


def _read(response: http.client.HTTPResponse, url: str) -> bytes:
    with _plain_connection_errors(url):
        return response.read1(65536)


def _error_text(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the daemon answered with HTTP status {status}"
