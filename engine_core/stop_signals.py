"""Which signals ask a serving process to end in good order."""

import signal


def stop_signals() -> list[signal.Signals]:
    """Return SIGTERM, SIGINT and, where a terminal that goes away is to end the process, SIGHUP.

    `nohup` starts a process with SIGHUP ignored, and then it stays ignored.
    """
    numbers = [signal.SIGTERM, signal.SIGINT]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        numbers.append(hangup)
    return numbers
