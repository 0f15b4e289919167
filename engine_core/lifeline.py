"""No engine outlives the process that started it: the lifeline.

The parent keeps the writing end of the child's stdin open and writes nothing. The kernel closes
it when the parent is gone, however it died, so reading end-of-file here means: leave.
"""

import ctypes
import os
import signal
import sys
import threading
import time

GRACE_SECONDS = 3.0
"""How long the orderly way out may take once the parent is gone."""
_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""

_lock = threading.Lock()
_watching = False


def start() -> None:
    """Watch stdin from a daemon thread; a second call changes nothing.

    Works in every phase of the process: the end of stdin counts as a SIGTERM, and where that does
    not end the process within `GRACE_SECONDS`, it is ended the hard way.
    """
    global _watching  # noqa: PLW0603 - stdin belongs to the process, so does its one watcher
    with _lock:
        if not _watching:
            _continue_when_orphaned()
            threading.Thread(target=_watch, name="lifeline", daemon=True).start()
            _watching = True


def _continue_when_orphaned() -> None:
    """Have a process that someone has stopped continued when its parent ends, so that it can leave.

    SIGCONT does nothing to a process that runs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def _watch() -> None:
    while True:
        try:
            if not os.read(0, 4096):
                break
        except OSError:  # stdin was closed or was never there: no parent to wait for
            break
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
