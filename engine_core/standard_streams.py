"""Standard input, output and error that are always there."""

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_missing() -> None:
    """Open on the null device what of the three was closed when the process was started.

    Otherwise the next file or socket takes the free number: then it is what a child gets as its
    standard stream, which libuv does not survive, and Python has None where code expects a stream.
    Call it before anything else is opened.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, so this one. Python opens what no child inherits.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
