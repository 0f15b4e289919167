"""Which model `cloud_gpu.py` measures, and with how much work."""

from dataclasses import dataclass

from cloud_engine.memory_plan import blocks_for


@dataclass(frozen=True)
class Shape:
    """A model and what is asked of it, in tokens.

    `prompt` and `new` are of the requests where many are served, and where `generate` has its
    turn; `new_drill` of those that generate during the drill.
    """

    model: dict[str, int]
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    new_cell: int
    prompt: int
    new: int
    new_drill: int

    @property
    def context(self) -> int:
        """The longest sequence."""
        return max(self.prompts) + max(self.new_cell, self.new, self.new_drill)

    def blocks(self, batch: int, prompt: int) -> int:
        """Return the blocks, one of trash among them, for so many sequences side by side.

        One more for each: nobody is let in who would leave the others no room to grow.
        """
        return batch * (blocks_for(prompt + self.new_cell) + 2) + 1


SHAPES = {
    "7b": Shape(
        model={
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        },
        prompts=(16, 64, 128, 512, 2048),
        batches=(1, 8, 64),
        new_cell=32,
        prompt=64,
        new=96,
        new_drill=256,
    ),
    "tiny": Shape(
        model={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 97,
            "max_position_embeddings": 256,
        },
        prompts=(16, 64),
        batches=(1, 8),
        new_cell=8,
        prompt=16,
        new=8,
        new_drill=16,
    ),
}
