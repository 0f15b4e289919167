"""How a benchmark talks to an engine in another process: one line of JSON each way.

Imported by programs that run in a peer's own environment, so it needs nothing but Python.
"""

import json
import os
import sys
from collections.abc import Callable

Times = list[list[float]]
"""For each sequence, when each of its tokens was there: seconds after the work was given."""
Run = Callable[[list[list[int]], int], Times]
"""Generates `max_tokens` greedily after each of some prompts of one length, all at once."""


def serve(load: Callable[[str, int], tuple[str, Run]]) -> None:
    """Load an engine and do the work that comes on stdin, until it ends.

    The command line names the model and the number of threads. Once the engine can work, a line
    `{"engine": NAME}` goes out; each line `{"prompts": [[ID, ...], ...], "max_tokens": N}` that
    comes in is answered by `{"times": [[SECONDS, ...], ...]}`.

    Args:
        load: Takes the model's path and the threads; returns what the engine calls itself and how
            to run it.
    """
    # Native code prints to stdout what belongs on stderr, and would garble the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine, run = load(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"engine": engine}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        times = run(work["prompts"], work["max_tokens"])
        print(json.dumps({"times": times}), file=answers, flush=True)
