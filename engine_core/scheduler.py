"""Which sequences compute which tokens in the next step.

A step is one forward pass over a mixed batch: a token of every sequence that is generating, then
chunks of prompts up to a budget. The scheduler is pure: it knows no model, reads no clock and takes
no lock. Whoever runs the steps calls `plan`, computes what it says, and calls `computed`; in
between, sequences may be added and may leave.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Protocol

from engine_core.errors import OverloadedError
from engine_core.types import PRIORITIES, TokenDraw


@dataclass(frozen=True, slots=True)
class Placement:
    """Room for one sequence: where it is, and how many leading tokens are in it already."""

    place: int
    cached: int


class KVSpace(Protocol):
    """Memory for keys and values, as far as scheduling goes: slots, or pages behind a table."""

    @property
    def free(self) -> int:
        """How many sequences could be admitted now, if they are short."""
        ...

    def admit(self, tokens: list[int], salt: str) -> Placement | None:
        """Reserve room for a sequence that begins with `tokens`, or return None.

        Args:
            tokens: The sequence so far, at least one token. At least the last is left to compute.
            salt: Only what a sequence of the same salt has left may be used again.
        """
        ...

    def grow(self, place: int, length: int) -> bool:
        """Make room for so many tokens in all; return whether there is.

        For a sequence that is alone there always is, up to the longest one.

        Args:
            place: Where `admit` has put the sequence.
            length: Its tokens with those of the next step.
        """
        ...

    def release(self, place: int, tokens: list[int], generated: int) -> None:
        """Take room back.

        Args:
            place: Where `admit` has put the sequence.
            tokens: What its first `len(tokens)` positions hold.
            generated: How many of them, at the end, were drawn and not part of the prompt.
        """
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One sequence on its way through the engine.

    Args:
        tokens: The prompt, at least one token; `Scheduler.append` adds what is generated.
        priority: Smaller goes first; a value of `PRIORITIES`.
        salt: See `KVSpace.admit`.
        deadline: When it is of no use any more, in seconds on the caller's clock; None for never.
        draw: What its tokens can be drawn with from logits alone, for models that do it themselves;
            None where it takes more.
    """

    tokens: list[int]
    priority: int = PRIORITIES["standard"]
    salt: str = ""
    deadline: float | None = None
    draw: TokenDraw | None = None
    arrival: int = field(default=0, init=False)
    """Its number, in the order in which sequences were added."""
    preempted: bool = field(default=False, init=False)
    """Whether it once had to make room and begin anew."""
    cached: int = field(default=0, init=False)
    """Tokens of the prompt that did not have to be computed."""
    computed: int = field(default=0, init=False)
    """Leading tokens whose keys and values are in place."""
    place: int | None = field(default=None, init=False)
    """Where they are; None while waiting and after the end."""
    left: bool = field(default=False, init=False)
    """Finished, failed or cancelled: nothing more is computed for it."""
    prompt_tokens: int = field(init=False)
    """How many of the tokens are the prompt; after making room, all that there were then."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def decoding(self) -> bool:
        """Whether all but the last token is computed, so that one token makes the next."""
        return self.computed == len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one sequence computes in one step.

    `tokens` go to `place`, behind the `begin` tokens that are in it.
    """

    sequence: Sequence
    place: int
    begin: int
    tokens: list[int]
    wants_logits: bool
    """Whether the last of the tokens is the last of the sequence."""
    generated: bool
    """Whether the tokens were drawn and are not part of the prompt."""


class Scheduler:
    """Plans steps over a space of keys and values.

    Order: `priority` first, arrival inside it. Prompts are computed in chunks, which go round
    between the prompts of one priority, so that a long prompt holds up nobody for longer than a
    few steps. What a step has room for beyond one round goes to those that have more to compute,
    and only what they leave to the next priority.

    Where a sequence that generates finds no room to grow, the latest one of the lowest priority
    makes room: it waits again, at the head of its list, and its tokens are computed anew.

    Args:
        space: Where sequences are placed.
        max_waiting: Sequences that may wait when no place is free; more are refused.
        chunk: Prompt tokens that one sequence gets before the next one has its turn.
        budget: Tokens of one step, at least `chunk`. Every sequence that generates takes part
            whatever the budget, and one chunk does.
        quiet_budget: The same for a step that holds up no sequence that generates; None for no
            more than `budget`.
    """

    def __init__(
        self,
        space: KVSpace,
        *,
        max_waiting: int,
        chunk: int,
        budget: int,
        quiet_budget: int | None = None,
    ) -> None:
        if not 0 < chunk <= budget:
            raise ValueError(f"a budget of {budget} tokens has no room for a chunk of {chunk}")
        self._space = space
        self._max_waiting = max_waiting
        self._chunk = chunk
        self._budget = budget
        self._quiet_budget = quiet_budget or budget
        self._added = 0
        self.preempted_total = 0
        """How often a sequence had to make room."""
        self._waiting: dict[int, deque[Sequence]] = {}
        # In the order in which they get their chunks inside a priority.
        self._placed: dict[Sequence, None] = {}
        self._in_step: frozenset[Sequence] = frozenset()
        self._went_ahead = False

    @property
    def waiting(self) -> int:
        """Sequences without a place."""
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        """Sequences that have a place."""
        return len(self._placed)

    @property
    def computed_tokens(self) -> int:
        """Tokens whose keys and values running sequences hold."""
        return sum(sequence.computed for sequence in self._placed)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of its priority's list.

        Raises:
            OverloadedError: as many as may wait are waiting.
        """
        waiting = self.waiting
        if waiting >= self._max_waiting + self._space.free:
            raise OverloadedError(
                f"{waiting} requests are waiting already; try again later.", code="queue_full"
            )
        self._added += 1
        sequence.arrival = self._added
        self._waiting.setdefault(sequence.priority, deque()).append(sequence)

    def late(self, now: float) -> list[Sequence]:
        """Return the sequences whose deadline has passed, waiting or running; they do not leave."""
        return [s for s in self._all() if s.deadline is not None and now >= s.deadline]

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence in whatever phase it is: finished, failed or cancelled. May be repeated.

        Its room is free at once, or after the step that it is part of.

        Args:
            sequence: One that was added.
            keep: Whether what it has in place can be trusted and may be used again.
        """
        if not keep:
            sequence.computed = 0
        if sequence.left:
            return
        sequence.left = True
        if sequence.place is None:
            self._waiting[sequence.priority].remove(sequence)
        elif sequence not in self._in_step:
            self._release(sequence)

    def plan(self) -> list[StepRow]:
        """Admit what has room and return the next step, empty if there is nothing to compute.

        Sequences that generate come first. `computed` must follow before the next plan.
        """
        self._admit()
        rows = list(self._decode_rows())
        rows += self._chunks(self._budget - len(rows) if rows else self._quiet_budget)
        self._in_step = frozenset(row.sequence for row in rows)
        return rows

    def computed(self, rows: Iterable[StepRow]) -> None:
        """Note that these rows of the planned step are in place, and that the step is over."""
        for row in rows:
            row.sequence.computed = row.begin + len(row.tokens)
        left = [sequence for sequence in self._in_step if sequence.left]
        self._in_step = frozenset()
        for sequence in left:
            self._release(sequence)

    def append(self, sequence: Sequence, token: int) -> None:
        """Add a generated token to a sequence that is computed to its end."""
        sequence.tokens.append(token)

    def _all(self) -> Iterator[Sequence]:
        return (s for s in chain(*self._waiting.values(), self._placed) if not s.left)

    def _admit(self) -> None:
        for priority in sorted(self._waiting):
            queue = self._waiting[priority]
            while queue:
                sequence = queue[0]
                placement = self._space.admit(sequence.tokens, sequence.salt)
                if placement is None:
                    return  # nobody behind it may take the room that it is waiting for
                queue.popleft()
                sequence.place = placement.place
                sequence.computed = placement.cached
                if not sequence.preempted:
                    sequence.cached = placement.cached
                self._placed[sequence] = None

    def _decode_rows(self) -> Iterator[StepRow]:
        """Yield a row for every sequence that generates and has, or is made, room for it."""
        for sequence in sorted((s for s in self._placed if s.decoding), key=_worth):
            while sequence.place is not None:
                if self._space.grow(sequence.place, len(sequence.tokens)):
                    yield _row(sequence, len(sequence.tokens))
                    break
                # Nobody who has a row in this step: those are worth more.
                self._preempt(max(self._placed, key=_worth))

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.computed = 0
        sequence.prompt_tokens = len(sequence.tokens)
        sequence.preempted = True
        self.preempted_total += 1
        self._waiting.setdefault(sequence.priority, deque()).appendleft(sequence)

    def _chunks(self, budget: int) -> list[StepRow]:
        """Share the budget between unfinished prompts, a chunk at a time."""
        ends: dict[Sequence, int] = {}
        for sequence, begin, end in self._turns():
            if ends and end - begin > budget:
                break
            budget -= end - begin
            ends[sequence] = end
        ends = self._those_ahead(ends)
        for sequence in ends:
            self._placed[sequence] = self._placed.pop(sequence)
        return [_row(sequence, end) for sequence, end in ends.items()]

    def _those_ahead(self, ends: dict[Sequence, int]) -> dict[Sequence, int]:
        """Let chunks that end their prompts go a step ahead of those that do not, every other step.

        Their first tokens come with the end of the step; nothing is gained by making them wait for
        a part of a long prompt, which is as far one step later.
        """
        ending = {sequence: end for sequence, end in ends.items() if end == len(sequence.tokens)}
        others = [sequence.priority for sequence in ends if sequence not in ending]
        self._went_ahead = (
            not self._went_ahead
            and bool(ending)
            and bool(others)
            and max(map(_priority, ending)) <= min(others)
        )
        return ending if self._went_ahead else ends

    def _turns(self) -> Iterator[tuple[Sequence, int, int]]:
        """Yield unfinished prompts and where their next chunks begin and end, in order."""
        # The sort is stable: inside a priority, whoever had a turn longest ago goes first.
        prompts = sorted((s for s in self._placed if not s.decoding), key=_priority)
        for _, equals in groupby(prompts, _priority):
            turns = deque((sequence, sequence.computed) for sequence in equals)
            while turns:
                sequence, begin = turns.popleft()
                end = min(begin + self._chunk, len(sequence.tokens))
                yield sequence, begin, end
                if end < len(sequence.tokens):
                    turns.append((sequence, end))

    def _release(self, sequence: Sequence) -> None:
        del self._placed[sequence]
        if sequence.place is not None:
            generated = max(0, sequence.computed - sequence.prompt_tokens)
            self._space.release(sequence.place, sequence.tokens[: sequence.computed], generated)
        sequence.place = None


def _priority(sequence: Sequence) -> int:
    return sequence.priority


def _worth(sequence: Sequence) -> tuple[int, int]:
    """Return what sorts sequences from the last to make room to the first."""
    return sequence.priority, sequence.arrival


def _row(sequence: Sequence, end: int) -> StepRow:
    if sequence.place is None:
        raise AssertionError("a sequence without a place cannot compute")
    return StepRow(
        sequence=sequence,
        place=sequence.place,
        begin=sequence.computed,
        tokens=sequence.tokens[sequence.computed : end],
        wants_logits=end == len(sequence.tokens),
        generated=sequence.computed >= sequence.prompt_tokens,
    )
