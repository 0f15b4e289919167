"""Which addresses may be listened on and called."""

import pytest

from router.addresses import is_loopback, url_fault


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "192.168.0.1", "example.com", "localhost.example.com", "127.1"]
)
def test_everything_else_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "https://",
        "https:///v1",
        "//example.com",
        "ftp://example.com",
        "https://exa mple.com",
        "https://example.com/\n",
        "https://[::1",
        "https://example.com:port",
        "https://example.com:0",
        "https://me@example.com",
        "https://@example.com",
        "https://[fe80::1]/v1",
    ],
)
def test_a_url_that_is_not_a_plain_web_address_is_faulty(url: str) -> None:
    assert url_fault(url, insecure=True) is not None


def test_insecure_means_only_plain_http() -> None:
    assert url_fault("http://gpu.lan/v1", insecure=True) is None
    assert url_fault("http://gpu.lan/v1", insecure=False) is not None
    assert url_fault("https://gpu.lan/v1", insecure=False) is None
