"""Prompts for measuring: windows of one English text, each different from all others."""

import random
from pathlib import Path

from engine_core.models import ModelFiles
from engine_core.tokenizer import Tokenizer

TEXT = Path(__file__).parent / "data" / "prose.txt"


class Corpus:
    """Token windows at random places.

    No two begin at the same token while there are unused ones, so that an engine that keeps the
    keys and values of earlier prompts finds none to use again.

    Args:
        files: The model whose tokens are wanted.
        seed: The same seed gives the same windows in the same order.
    """

    def __init__(self, files: ModelFiles, seed: int = 0) -> None:
        self._ids = Tokenizer.load(files).encode(TEXT.read_text("utf-8"))
        self._random = random.Random(seed)
        self._begins: list[int] = []

    def prompt(self, length: int) -> list[int]:
        """Return a window of `length` tokens."""
        if not self._begins:
            self._begins = list(range(len(self._ids)))
            self._random.shuffle(self._begins)
        begin = self._begins.pop()
        # Around the end, so that every place can begin a window of any length.
        return (self._ids[begin:] + self._ids[:begin])[:length]

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return `count` windows of `length` tokens."""
        return [self.prompt(length) for _ in range(count)]
