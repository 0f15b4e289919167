"""A process that was started with closed standard streams works as with open ones."""

import subprocess
import sys

import pytest

CODE = """
import os, subprocess, sys
from engine_core import standard_streams
standard_streams.open_missing()
assert os.open(os.devnull, os.O_RDONLY) > 2
print("out")
print("err", file=sys.stderr)
child = "import sys; print(sys.stdin is None, sys.stdout is None, sys.stderr is None)"
assert subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE).stdout == (
    b"False False False\\n"
)
assert sys.stdin.read() == ""
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ""])
def test_closed_streams_are_the_null_device(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, CODE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr.replace(b"err\n", b"")) == (0, b"")
    assert done.stdout == (b"" if ">&-" in closed.replace("2>&-", "") else b"out\n")
