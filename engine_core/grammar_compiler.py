"""Which tokens may come next if an answer is to match a grammar, by way of llguidance.

llguidance knows the bytes of every token and answers within some 10 µs which ones may follow. Where
the grammar leaves only one way to go on, it asks for the tokens in which the tokenizer itself would
write that text, so that the model reads what it was trained on.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import tokenizers
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from engine_core.errors import InvalidRequestError, OverloadedError
from engine_core.grammar import Grammar
from engine_core.grammar_trial import parser_limits, plain_error, try_grammar
from engine_core.text_stream import silent_ids, spelling

KEPT_BYTES = 64 * 1024**2
"""Compiled grammars that are kept for the next request, by what their trials took."""
HELD_BYTES = 4 * KEPT_BYTES
"""Compiled grammars that are kept or followed by some answer; beyond that new ones must wait."""
_LEAST_BYTES = 256 * 1024
"""Of a compiled grammar; small ones fit into what a trial has allocated already."""
_SECONDS_PER_TOKEN = 0.005
_SECONDS_AT_ONCE = 1.0
"""CPU time that following a grammar may take, for each token and beyond that.

It is taken from all sequences that are generated at the same time, since they share their steps.
"""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Compiled:
    """A grammar's matcher, to be copied, and what it takes of memory."""

    matcher: LLMatcher
    bytes: int


class TokenMatcher:
    """Holds one sequence to a grammar. Used by one thread at a time.

    As long as it lives, the grammar is not compiled again.

    Args:
        compiled: The grammar.
        param: The field of the client's request, for errors.
    """

    def __init__(self, compiled: _Compiled, param: str) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._param = param
        self._seconds = _SECONDS_AT_ONCE

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return for each of the model's tokens, shape [vocab_size], whether it may come next.

        End-of-turn tokens may where the text matches the grammar, and nothing else may where no
        longer text does.

        Raises:
            InvalidRequestError: the grammar takes too long to follow.
        """
        began = time.thread_time()
        mask = self._matcher.compute_bitmask()
        self._check(began)
        allowed = np.zeros(vocab_size, bool)  # models pad their vocabulary
        known = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        size = min(vocab_size, len(known))
        allowed[:size] = known[:size]
        return allowed

    def accept(self, token: int) -> None:
        """Go on behind a token that was allowed.

        Raises:
            InvalidRequestError: the grammar takes too long to follow.
        """
        began = time.thread_time()
        self._matcher.consume_token(token)
        self._seconds = min(_SECONDS_AT_ONCE, self._seconds + _SECONDS_PER_TOKEN)
        self._check(began)

    def _check(self, began: float) -> None:
        self._seconds -= time.thread_time() - began
        if self._matcher.is_error():
            raise _error(self._param, plain_error(self._matcher))
        if self._seconds < 0:
            raise _error(self._param, "it takes too long to follow; make it smaller or simpler.")


class GrammarCompiler:
    """Makes matchers for one model's tokenizer. Safe to use from several threads.

    The vocabulary is prepared with the first grammar, which takes 0.5 s and 13 MiB for 49k tokens.

    Args:
        core: The tokenizer.
        eos_ids: Ids that end a turn.
    """

    def __init__(self, core: tokenizers.Tokenizer, eos_ids: Iterable[int]) -> None:
        self._core = core
        self._eos_ids = sorted(eos_ids)
        self._preparing = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()
        # Under this lock: what is kept, the least recently used one first, and all that there is.
        self._kept: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._held: WeakValueDictionary[Grammar, _Compiled] = WeakValueDictionary()

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """Return a matcher at the beginning of a text; see `ChatTokenizer.matcher`."""
        with self._lock:
            compiled = self._held.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            self._admit(compiled)
        self._keep(grammar, compiled)
        return TokenMatcher(compiled, grammar.param)

    def _compile(self, grammar: Grammar) -> _Compiled:
        vocabulary = self._prepared(grammar.param)
        try:
            source = grammar.source()
        except ValueError as error:
            raise _error(grammar.param, str(error)) from error
        size = 0
        if grammar.kind != "json_object":  # which is no client's invention
            trial = try_grammar(source)
            if trial.error:
                raise _error(grammar.param, trial.error)
            size = trial.bytes
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=parser_limits())
        matcher.compute_bitmask()  # what it finds out, its copies know
        if matcher.is_error():
            raise _error(grammar.param, plain_error(matcher))
        return _Compiled(matcher, max(size, _LEAST_BYTES))

    def _admit(self, compiled: _Compiled) -> None:
        with self._lock:
            held = sum(each.bytes for each in self._held.values())
        if held + compiled.bytes > HELD_BYTES:
            raise OverloadedError(
                "The grammars of running requests take too much memory; try again later.",
                code="memory_pressure",
            )

    def _keep(self, grammar: Grammar, compiled: _Compiled) -> None:
        with self._lock:
            self._held[grammar] = self._kept[grammar] = compiled
            self._kept.move_to_end(grammar)
            while sum(each.bytes for each in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)

    def _prepared(self, param: str) -> LLTokenizer:
        with self._preparing:
            if self._vocabulary is None:
                to_bytes = spelling(self._core)
                if to_bytes is None or not self._eos_ids:
                    lack = "fixed text for each token" if self._eos_ids else "end-of-turn token"
                    raise _error(param, f"this model's tokenizer has no {lack}; use another model.")
                vocabulary = _Vocabulary(self._core, self._eos_ids, to_bytes)
                self._vocabulary = LLTokenizer(
                    TokenizerWrapper(vocabulary), eos_token=self._eos_ids
                )
                vocabulary.greedy = self._vocabulary.greedy_tokenize
            return self._vocabulary


class _Vocabulary:
    """A tokenizer in the shape that `llguidance.TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(
        self, core: tokenizers.Tokenizer, eos_ids: list[int], to_bytes: Callable[[str], bytes]
    ) -> None:
        silent = silent_ids(core)
        names = map(core.id_to_token, range(core.get_vocab_size(with_added_tokens=True)))
        self._core = core
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = sorted(silent | set(eos_ids))
        # Gaps in the ids, which some vocabularies have, get no text and are never allowed.
        self.tokens = [b"" if name is None else to_bytes(name) for name in names]
        self._spoken = [b"" if id_ in silent else token for id_, token in enumerate(self.tokens)]
        self.greedy: Callable[[str], list[int]] = lambda _: []  # until there is one

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text, those of the tokenizer itself if they are that text.

        They are not where it normalises a text, marks its beginning with a space or knows a control
        token of that name.
        """
        plain = text.decode()
        ids: list[int] = self._core.encode(plain, add_special_tokens=False).ids
        return ids if b"".join(self._spoken[id_] for id_ in ids) == text else self.greedy(plain)


def _error(param: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"'{param}' cannot be enforced: {reason}", param=param, code="unsupported_parameter"
    )
