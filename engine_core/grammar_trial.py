"""Compile a grammar first where it can do no harm: in a process with little time and memory.

A grammar comes from a client, and a few dozen characters can keep the compiler busy for minutes and
take hundreds of megabytes (four different `multipleOf` under `allOf`, for one). llguidance bounds
the size of what it builds but not the work on the way there, and a thread cannot be stopped. So the
first attempt is made by a child process under the kernel's limits. That takes 0.1 s of CPU time,
once for each grammar that the compiler does not know yet.

    python -m engine_core.grammar_trial < GRAMMAR
"""

import json
import resource
import subprocess
import sys
from dataclasses import dataclass

import psutil
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine_core.errors import EngineFailureError
from engine_core.grammar import Grammar

CPU_SECONDS = 2
"""Of the child, its start included; schemas with 2000 properties take a tenth of it."""
MEMORY_BYTES = 64 * 1024**2
"""For the compiled grammar; schemas with 2000 properties take 10 MiB."""
_WALL_SECONDS = 60
"""Only a machine that is far too busy lets it come to this."""
_TOO_COSTLY = (
    f"it takes more than {CPU_SECONDS} s or {MEMORY_BYTES // 1024**2} MiB to compile; make it "
    "smaller or simpler."
)


def parser_limits() -> LLParserLimits:
    """Return limits that keep each token's work within milliseconds; ordinary schemas need a tenth.

    The defaults are several times larger and allow for 500 MiB of lexer states.
    """
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # writing them can take minutes
    )


def plain_error(matcher: LLMatcher) -> str:
    """Return what is wrong with a matcher, on one line; nothing if all is well."""
    text = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
    return "nothing can match it." if text == "NoExtensionBias" else text


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of compiling a grammar: what is wrong with it, if anything, and its memory."""

    error: str
    bytes: int


def try_grammar(source: str) -> Trial:
    """Compile a grammar in a child process.

    Args:
        source: A `Grammar.source()`.

    Raises:
        EngineFailureError: the child did not work.
    """
    command = [sys.executable, "-m", "engine_core.grammar_trial"]
    try:
        done = subprocess.run(
            command,
            input=source,
            capture_output=True,
            text=True,
            timeout=_WALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Trial(_TOO_COSTLY, 0)
    if done.returncode < 0:  # a signal: of the limit on CPU time, or of an allocation that failed
        return Trial(_TOO_COSTLY, 0)
    if done.returncode > 0:
        raise EngineFailureError(f"The grammar compiler does not work: {done.stderr[-300:]}")
    return Trial(**json.loads(done.stdout))


def main() -> None:
    """Compile the grammar on standard input; write the trial as JSON."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    source, vocabulary = sys.stdin.read(), LLTokenizer("byte")
    _compile(vocabulary, Grammar("json_object").source())  # what the library itself takes
    process = psutil.Process()
    before = process.memory_info()
    resource.setrlimit(resource.RLIMIT_AS, (before.vms + MEMORY_BYTES,) * 2)
    matcher = _compile(vocabulary, source)
    grown = max(0, process.memory_info().rss - before.rss)
    json.dump({"error": plain_error(matcher), "bytes": grown}, sys.stdout)


def _compile(vocabulary: LLTokenizer, source: str) -> LLMatcher:
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # prepares the lexer, which can take as long
    return matcher


if __name__ == "__main__":
    main()
