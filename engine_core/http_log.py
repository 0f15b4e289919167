"""The log of aiohttp's HTTP server, without what clients send."""

import logging

from aiohttp.http_exceptions import HttpProcessingError


def http_log(name: str) -> logging.Logger:
    """Return a logger for aiohttp's server that keeps the bytes of malformed requests to itself.

    aiohttp logs a request that it cannot parse with the bytes at fault, among which may be a key
    or a prompt.
    """
    log = logging.getLogger(name)
    log.addFilter(_hide_bytes)
    return log


def _hide_bytes(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.exc_info = None
        record.msg += ": malformed HTTP"
    return True
