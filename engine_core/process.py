"""An engine as a process: command line, socket, signals, logging, exit code."""

import argparse
import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Never, TypeVar

from aiohttp import web

from engine_core import lifeline, standard_streams
from engine_core.errors import ModelError, TidegateError
from engine_core.http_log import http_log
from engine_core.machine_limits import threads_fault
from engine_core.server import make_app
from engine_core.stop_signals import stop_signals
from engine_core.types import Engine

if sys.platform == "win32":
    _new_loop = asyncio.new_event_loop
else:
    from uvloop import new_event_loop as _new_loop

USAGE_ERROR = 2
"""Exit code when the user must change something: model, option, address."""

_CLOSE_SECONDS = 3.0
"""Until a running step must have ended."""
_INTERRUPT_SECONDS = 0.2
"""The same while the model is still loading, which does not look at anything."""
_BACKLOG = 128

T = TypeVar("T")

_log = logging.getLogger("tidegate.engine")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every engine's `serve` command has."""
    parser.add_argument("--model", required=True, help="name of the model to serve")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--uds", type=Path, metavar="PATH", help="listen on this UNIX socket")
    where.add_argument(
        "--tcp", type=_loopback, metavar="HOST:PORT", help="listen on this loopback address"
    )
    parser.add_argument(
        "--context",
        type=positive,
        metavar="TOKENS",
        help="longest sequence, prompt and answer together (default: the engine's choice)",
    )
    parser.add_argument(
        "--threads",
        type=_threads,
        help="CPU threads, at most one per processor (default: physical cores)",
    )
    parser.add_argument(
        "--max-waiting",
        type=positive,
        default=64,
        metavar="REQUESTS",
        help="waiting requests beyond which more are refused with 503 (default: %(default)s)",
    )
    parser.add_argument(
        "--lifeline", action="store_true", help="end when stdin reaches end-of-file"
    )


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def from_text(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser for argparse; that given raises `ValueError` with what it expected."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {error}, got '{text}'") from None

    return parsed


def _threads(text: str) -> int:
    """Parse a number of threads, for argparse."""
    threads = positive(text)
    if fault := threads_fault(threads):
        raise argparse.ArgumentTypeError(fault)
    return threads


def run_command(command: Callable[[], int]) -> int:
    """Run a command of an engine; return the exit code.

    SIGTERM and SIGINT run the clean-up of a half-done download or build. What the user has to
    change is told as by `fail`.
    """
    standard_streams.open_missing()
    # As an exception; by default it would end the process where it stands.
    signal.signal(signal.SIGTERM, _leave)
    try:
        return command()
    except TidegateError as error:
        return fail(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def begin(args: argparse.Namespace) -> None:
    """Set up logging and the lifeline; call it before the model is pulled or built."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.captureWarnings(capture=True)
    if args.lifeline:
        lifeline.start()


def fail(error: Exception) -> int:
    """Print what the user has to do, on one line without a traceback; return the exit code."""
    print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201 - this is the interface
    return USAGE_ERROR


def run_engine(engine: Engine, args: argparse.Namespace) -> int:
    """Start the engine, serve it until one of `stop_signals`, and return the exit code.

    The socket accepts connections only once the model can answer.

    Args:
        engine: Not yet started.
        args: What `add_serve_arguments` parsed.

    Returns:
        0 after a signal, 2 when the model cannot be loaded or the address not be used.
    """
    begin(args)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        try:
            closed = runner.run(_serve(engine, args))
        except TidegateError as error:
            return fail(error)
    if not closed:
        # A load cannot be interrupted, and native code that is still running while the
        # interpreter finalises crashes it.
        logging.shutdown()
        os._exit(0)
    return 0


def _leave(number: int, _frame: object) -> Never:
    sys.exit(128 + number)


async def _serve(engine: Engine, args: argparse.Namespace) -> bool:
    """Serve until a signal; return whether the engine closed in time."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    # Bound before the load, so that a wrong address is told in a moment; it listens after it.
    listener = _bind(args)
    app = None
    try:
        if await _unless(stop, engine.start()):
            with _plain_address_errors(args):
                # Of two that were bound to one port, only one may listen; uvloop would not say.
                listener.listen(_BACKLOG)
            app = await _listen(engine, listener)
            _log.info(
                "ready model=%s context=%d at=%s",
                engine.model,
                engine.context_window,
                _name(listener),
            )
            await stop.wait()
            _log.info("stopping")
    finally:
        # First the engine, so that open streams end with an error frame instead of a cut.
        closed = await _close(engine, _CLOSE_SECONDS if app else _INTERRUPT_SECONDS)
        if app:
            await app.cleanup()
        listener.close()
        if args.uds is not None:
            args.uds.unlink(missing_ok=True)
    return closed


async def _listen(engine: Engine, listener: socket.socket) -> web.AppRunner:
    app = web.AppRunner(
        make_app(engine),
        handler_cancellation=True,  # a client that hangs up cancels its generation
        access_log=None,
        logger=http_log("tidegate.engine.http"),
        auto_decompress=False,  # a compressed body is refused, so it cannot be a bomb
        shutdown_timeout=1.0,
        keepalive_timeout=75.0,
    )
    await app.setup()
    await web.SockSite(app, listener, backlog=_BACKLOG).start()
    return app


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Await the work unless `stop` comes first; return whether it was done."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()
        return not stop.is_set()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False


async def _close(engine: Engine, seconds: float) -> bool:
    """Close the engine; return whether it was done in time."""
    try:
        await asyncio.wait_for(engine.close(), seconds)
    except TimeoutError:
        return False
    return True


def _loopback(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"'{text}' is not HOST:PORT")
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise argparse.ArgumentTypeError(
            f"'{host}' is not a loopback address; an engine asks for no key, so it is reached from "
            "other machines only through a proxy or a tunnel that does"
        )
    return host, int(port)


def _bind(args: argparse.Namespace) -> socket.socket:
    with _plain_address_errors(args):
        if args.uds is not None:
            return _bind_unix(args.uds)
        host, port = args.tcp
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        return sock


@contextlib.contextmanager
def _plain_address_errors(args: argparse.Namespace) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = args.uds or ":".join(map(str, args.tcp))
        reason = error.strerror or str(error)
        raise ModelError(f"cannot listen on {where}: {reason}; choose another address") from None


def _bind_unix(path: Path) -> socket.socket:
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, "another engine is listening there")
        path.unlink(missing_ok=True)  # left behind by a process that was killed
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # the socket is ours alone from its first moment
    try:
        sock.bind(str(path))
    finally:
        os.umask(before)
    return sock


def _name(listener: socket.socket) -> str:
    address = listener.getsockname()
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"
