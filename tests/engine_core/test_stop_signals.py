"""A process that serves ends in good order on every signal that is meant to end it."""

import signal

from engine_core.stop_signals import stop_signals


def test_a_terminal_that_goes_away_ends_the_process() -> None:
    assert set(stop_signals()) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def test_nohup_keeps_it_running() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert set(stop_signals()) == {signal.SIGTERM, signal.SIGINT}
    finally:
        signal.signal(signal.SIGHUP, before)
