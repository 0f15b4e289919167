"""Which addresses the daemon may listen on and call."""

import ipaddress
from urllib.parse import SplitResult, urlsplit


def is_loopback(host: str) -> bool:
    """Return whether `host` can only be this machine. Names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_fault(url: str, *, insecure: bool) -> str | None:
    """Return why an upstream URL is not acceptable, or None.

    The message never repeats the URL, which may hold a password.

    Args:
        url: Base URL of an OpenAI-compatible server.
        insecure: Whether the operator accepts plain http to another machine.
    """
    parts = _split(url)
    if parts is None or parts.hostname is None:
        return "expected a URL such as https://api.example.com/v1"
    if "@" in parts.netloc:
        return "a user or password in the URL ends up in logs; use 'key_file' or 'key_env'"
    if parts.query or parts.fragment:
        return "a base URL has no ? or # part; remove it"
    if _is_link_local(parts.hostname):
        return "link-local addresses are not called (cloud metadata services live there)"
    if parts.scheme == "http" and not is_loopback(parts.hostname) and not insecure:
        return (
            "http sends prompts and keys in the clear; use https, "
            "or write 'insecure: true' if the network is trusted"
        )
    return None


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        well_formed = parts.port is None or parts.port > 0  # reading .port checks it
    except ValueError:
        return None
    spaced = any(c.isspace() or not c.isprintable() for c in url)
    return parts if well_formed and parts.scheme in {"http", "https"} and not spaced else None


def _is_link_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_link_local
    except ValueError:
        return False
