"""Packed streams: the logits of each sequence are those that it has by itself."""

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TINY, save_tiny_model

from cloud_engine.attention import (
    ATTENTION,
    REFERENCE,
    PackedStep,
    check_supported,
    packed_attention,
    paged_ops,
)
from cloud_engine.span_attention import Span, Spans
from engine_core.errors import ModelError

BLOCK_SIZE = 4
BLOCKS_EACH = 8
LENGTHS = (11, 5, 23)
SCHEDULE = ((4, 5, 7), (1, 0, 9), (3, 0, 1), (3, 0, 6))
"""How many tokens of each sequence go into each step."""
WINDOW = 7
NO_VALUE = float("nan")
"""What blocks hold before anything is written: attention must not even look at it."""
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", TINY),
    "qwen2": ("qwen2", TINY),
    "qwen3": ("qwen3", TINY),
    "mistral": ("mistral", TINY | {"sliding_window": None}),
    "mistral-window": ("mistral", TINY | {"sliding_window": WINDOW}),
    "gemma3-both": (
        "gemma3_text",
        TINY | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


class Stream:
    """Feeds sequences to a model in packed steps, over scattered blocks."""

    def __init__(self, model: Any, *, by_spans: bool, padding: int = 0) -> None:
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation(ATTENTION)
        config = model.config
        heads, size = config.num_key_value_heads, config.head_dim
        rows = len(LENGTHS)
        shape = (1 + rows * BLOCKS_EACH, BLOCK_SIZE, heads, size)
        self.keys = [torch.full(shape, NO_VALUE) for _ in range(config.num_hidden_layers)]
        self.values = [torch.full(shape, NO_VALUE) for _ in range(config.num_hidden_layers)]
        scattered = torch.randperm(rows * BLOCKS_EACH, generator=torch.Generator().manual_seed(1))
        self.tables = torch.zeros((rows + 1, BLOCKS_EACH), dtype=torch.int32)
        self.tables[:rows] = scattered.view(rows, BLOCKS_EACH) + 1
        self.by_spans = by_spans
        self.padding = padding
        self.done = [0] * rows
        self.logits: list[list[torch.Tensor]] = [[] for _ in LENGTHS]

    def step(self, sequences: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """Compute the next tokens, so many of each sequence."""
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        spans: list[Span] = []
        for row, count in enumerate(counts):
            begin, end = self.done[row], self.done[row] + count
            if count:
                spans.append(Span(len(tokens), len(tokens) + count, row, end))
            tokens += sequences[row][begin:end].tolist()
            positions += range(begin, end)
            rows += [row] * count
            self.done[row] = end
        real = len(tokens)
        pad = [0] * self.padding
        place, row_of = (
            torch.tensor(positions + pad),
            torch.tensor(rows + [len(LENGTHS)] * len(pad)),
        )
        slots = self.tables[row_of, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
        packed = PackedStep(
            slots=slots.long(),
            contexts=(place + 1).int(),
            table_rows=row_of.int(),
            tables=self.tables,
            keys=self.keys,
            values=self.values,
            ops=REFERENCE,
            spans=Spans(spans, self.tables, BLOCK_SIZE) if self.by_spans else None,
        )
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.tensor([tokens + pad]),
                position_ids=place[None],
                use_cache=False,
                logits_to_keep=torch.arange(real),
                packed=packed,
            ).logits[0]
        for row, token_logits in zip(rows, logits, strict=True):
            self.logits[row].append(token_logits)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return what makes the torch model of a family, once each."""
    made: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in made:
            family, config = FAMILIES[name]
            folder = tmp_path_factory.mktemp("models") / name
            made[name] = save_tiny_model(folder, family, **config).torch_model
        return made[name]

    return make


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]


def alone(model: Any, sequence: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(sequence[None], use_cache=False).logits[0]
    return logits


def assert_as_alone(stream: Stream, model: Any, sequences: Sequence[torch.Tensor]) -> None:
    for sequence, found in zip(sequences, stream.logits, strict=True):
        wanted = alone(model, sequence)[: len(found)]
        # Of the largest logit: those of tiny models with large weights reach 60.
        assert (torch.stack(found) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("by_spans", [True, False], ids=["spans", "rows"])
@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_steps_give_each_sequence_the_logits_it_has_alone(
    models: Callable[[str], Any], name: str, by_spans: bool
) -> None:
    model, sequences = models(name), texts()
    check_supported(model)
    stream = Stream(model, by_spans=by_spans)
    for counts in SCHEDULE:
        stream.step(sequences, counts)
    assert stream.done == list(LENGTHS)
    assert_as_alone(stream, model, sequences)


@given(data=st.data(), by_spans=st.booleans(), name=st.sampled_from(["qwen3", "mistral-window"]))
@settings(max_examples=12)
def test_any_cut_of_the_sequences_into_steps_gives_the_same(
    models: Callable[[str], Any], data: st.DataObject, by_spans: bool, name: str
) -> None:
    model, sequences = models(name), texts()
    stream = Stream(model, by_spans=by_spans)
    while stream.done != list(LENGTHS):
        left = [length - done for length, done in zip(LENGTHS, stream.done, strict=True)]
        counts = data.draw(st.tuples(*(st.integers(0, most) for most in left)).filter(any))
        stream.step(sequences, counts)
    assert_as_alone(stream, model, sequences)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_padding_changes_nothing_but_the_trash_block(
    models: Callable[[str], Any], name: str
) -> None:
    sequences = texts()
    bare, padded = (Stream(models(name), by_spans=False, padding=padding) for padding in (0, 5))
    for counts in SCHEDULE:
        bare.step(sequences, counts)
        padded.step(sequences, counts)
    for wanted, found in zip(bare.logits, padded.logits, strict=True):
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=0, atol=2e-5)
    for wanted, found in zip(
        (*bare.keys, *bare.values), (*padded.keys, *padded.values), strict=True
    ):
        torch.testing.assert_close(found[1:], wanted[1:], equal_nan=True, rtol=0, atol=2e-5)
        assert wanted[0].isnan().all()
        assert not found[0, 0].isnan().any()


def test_gpt2_is_served_where_transformers_lets_it_and_refused_where_not() -> None:
    config = transformers.AutoConfig.for_model("gpt2", **GPT2, bos_token_id=None, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    config.num_key_value_heads, config.head_dim = GPT2["n_head"], 16
    check_supported(model)
    stream, sequences = Stream(model, by_spans=True), texts()
    if transformers.__version__.startswith("4."):
        with pytest.raises(ModelError, match="does not pass on where its tokens belong"):
            stream.step(sequences, SCHEDULE[0])
        return
    for counts in SCHEDULE:
        stream.step(sequences, counts)
    assert_as_alone(stream, model, sequences)


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("mamba", {"hidden_size": 64, "num_hidden_layers": 1}, "recurrent state|linear attention"),
        ("bloom", {"hidden_size": 64, "n_layer": 1, "n_head": 4}, "brings its own attention"),
        (
            "qwen2",
            TINY | {"layer_types": ["full_attention", "chunked_attention"]},
            "has layers of chunked attention",
        ),
        ("gemma3n_text", TINY | {"num_kv_shared_layers": 1}, "shares keys and values"),
    ],
)
def test_a_model_that_looks_back_by_other_means_is_refused(
    family: str, config: dict[str, Any], reason: str
) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **config)
        )
    with pytest.raises(ModelError, match=rf"({reason}).* 'url' target"):
        check_supported(model)


def test_a_model_with_an_encoder_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=64, d_ff=64, num_layers=1, vocab_size=97)
        )
    with pytest.raises(ModelError, match="has an encoder"):
        check_supported(model)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"softcap": 30.0}, "caps its attention's scores"),
        ({"s_aux": torch.zeros(2)}, "has attention sinks"),
        ({"indices": torch.zeros(2)}, "attends to chosen tokens alone"),
        ({"attention_mask": torch.zeros(1)}, "masks its attention by itself"),
        ({"value": torch.zeros(1, 2, 3, 4)}, "has keys and values of different sizes"),
        ({"packed": None}, "does not pass on where its tokens belong"),
        ({"module": SimpleNamespace(is_causal=False, layer_idx=0)}, "looks at later tokens"),
    ],
)
def test_what_is_not_computed_is_refused(changed: dict[str, Any], reason: str) -> None:
    blocks = [torch.zeros(2, 4, 2, 8)]
    three = torch.ones(3, dtype=torch.int32)
    call: dict[str, Any] = {
        "module": SimpleNamespace(layer_idx=0),
        "query": torch.zeros(1, 2, 3, 8),
        "key": torch.zeros(1, 2, 3, 8),
        "value": torch.zeros(1, 2, 3, 8),
        "attention_mask": None,
        "packed": PackedStep(
            three.long(), three, three * 0, three[:, None], blocks, blocks, REFERENCE
        ),
    }
    packed_attention(**call, softcap=None, dropout=0.0)
    with pytest.raises(ModelError, match=rf"^SimpleNamespace {reason}.* 'url' target"):
        packed_attention(**(call | changed))


def test_the_cpu_has_the_reference() -> None:
    assert paged_ops(torch.device("cpu")) is REFERENCE
