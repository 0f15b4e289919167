"""INT8 weights: near the exact ones, half of bfloat16's bytes, one product for all types."""

import copy
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY
from torch import nn
from transformers import AutoModelForCausalLM
from triton_script import run_triton_script

from cloud_engine import int8
from cloud_engine.int8 import Int8Embedding, Int8Linear, multiply, quantize_linears, quantize_rows
from engine_core.errors import ModelError
from engine_core.models import ModelFiles, ModelStore
from engine_core.tokenizer import Tokenizer

TEXT = Path(__file__).parents[2] / "benchmarks" / "data" / "prose.txt"
WINDOW = 256
TOKENS = 4096
FLOAT_TYPES = [torch.float32, torch.bfloat16, torch.float16]
# A product is rounded once to its type, and so is each scaled weight where float16 wants that.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def tiny_model(family: str = "llama", **config: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    shape = AutoConfig.for_model(family, **{**TINY, **config})
    return AutoModelForCausalLM.from_config(shape).eval().requires_grad_(requires_grad=False)


def all_bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def test_each_row_is_rounded_to_the_nearest_of_its_255_numbers() -> None:
    weight = torch.randn(6, 40) * torch.tensor([1e-3, 1, 1, 50, 1, 1])[:, None]
    weight[4] = 0
    before = weight.clone()
    quantized, scale = quantize_rows(weight)
    assert torch.equal(weight, before)
    assert torch.allclose(scale[:4], weight[:4].abs().amax(1) / 127)
    assert quantized.dtype == torch.int8
    assert quantized.abs().amax(1).tolist() == [127, 127, 127, 127, 0, 127]
    assert ((quantized * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounding_of_a_scale_costs_no_accuracy(dtype: torch.dtype) -> None:
    weight = (0.02 * torch.randn(64, 300)).to(dtype)
    quantized, scale = quantize_rows(weight)
    assert scale.dtype == dtype
    error = (quantized.double() * scale.double()[:, None] - weight.double()).abs()
    # Half a step, but for the largest numbers where the scale was rounded down.
    largest = weight.abs().amax(1, keepdim=True).double()
    assert (error <= torch.maximum(0.5001 * scale[:, None].double(), 2**-8 * largest)).all()


def test_rows_do_not_depend_on_how_many_are_quantized_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, rows = torch.randn(50, 64), torch.randn(40, 64)
    whole = quantize_rows(weight)
    product = multiply(rows, *whole)
    monkeypatch.setattr(int8, "_AT_ONCE", {"cpu": 7 * 64})
    parts = quantize_rows(weight)
    assert all(torch.equal(*pair) for pair in zip(parts, whole, strict=True))
    assert torch.allclose(multiply(rows, *parts), product, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("outputs", "width"), [(96, 64), (5, 48), (33, 66), (1, 7)])
@pytest.mark.parametrize("count", [1, 3, 32, 33, 100])
def test_the_product_is_that_with_the_scaled_weight(
    dtype: torch.dtype, outputs: int, width: int, count: int
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(count, width).to(dtype)
    weight, scale = quantize_rows(torch.randn(outputs, width).to(dtype))
    found = multiply(rows, weight, scale)
    exact = rows.double() @ (weight * scale.double()[:, None]).T
    assert found.dtype == dtype
    assert (found - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()


def test_rows_that_are_not_aligned_are_multiplied_too() -> None:
    # torch's packed product would end the process.
    weight, scale = quantize_rows(torch.randn(8, 64).bfloat16())
    rows = torch.randn(1, 67).bfloat16()[:, 3:]
    found, wanted = multiply(rows, weight, scale), multiply(rows.clone(), weight, scale)
    assert torch.allclose(found, wanted, rtol=ROUNDING[torch.bfloat16])


def test_float16_products_do_not_overflow_before_they_are_scaled() -> None:
    weight, scale = quantize_rows(torch.full((3, 64), 0.01, dtype=torch.float16))
    found = multiply(torch.full((2, 64), 100, dtype=torch.float16), weight, scale)
    assert torch.allclose(found, torch.full_like(found, 64), rtol=1e-2)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_a_model_s_logits_stay_close(family: str, embeddings: bool) -> None:
    model, tokens = tiny_model(family), torch.arange(40)[None]
    with torch.inference_mode():
        exact = model(tokens).logits
        quantize_linears(model, embeddings=embeddings)
        found = model(tokens).logits
    assert 0 < (found - exact).abs().max() < 0.03 * exact.abs().max()
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(nn.Linear) == (0 if embeddings else 1)  # the head
    assert kinds.count(Int8Linear) == 2 * 7 + embeddings
    assert kinds.count(Int8Embedding) == embeddings


def test_biases_are_kept() -> None:
    linear = nn.Linear(16, 4)
    found = Int8Linear.of(linear)
    hidden = torch.zeros(2, 3, 16)
    assert torch.equal(found(hidden), linear.bias.detach().expand(2, 3, 4))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_and_its_table_stay_one(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    quantize_linears(model, embeddings=True)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (table.weight.data_ptr() == head.weight.data_ptr()) == tied


def test_old_weights_go_as_the_new_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    old = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    alive = []

    def counting(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        alive.append(sum(reference() is not None for reference in old))
        return quantize_rows(weight)

    monkeypatch.setattr(int8, "quantize_rows", counting)
    quantize_linears(model, embeddings=False)
    assert alive == [15 - done for done in range(14)]


@pytest.mark.parametrize("embeddings", [False, True])
def test_nothing_is_left_of_the_file_that_weights_are_mapped_from(
    embeddings: bool, tmp_path: Path
) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)  # with biases
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    mapped = {weight.data_ptr() for weight in model.parameters()}
    quantize_linears(model, embeddings=embeddings)
    assert not mapped & {weight.data_ptr() for weight in (*model.parameters(), *model.buffers())}


def test_a_model_without_linear_layers_is_refused() -> None:
    # GPT-2's are transposed and of transformers' own class.
    model = tiny_model("gpt2", n_layer=1, n_head=2, n_embd=16)
    with pytest.raises(ModelError, match=r"int8 .* GPT2LMHeadModel has none"):
        quantize_linears(model, embeddings=False)


def test_what_no_linear_layer_holds_stays_wide_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("llama")
    quantize_linears(copy.deepcopy(model), embeddings=True)
    assert not caplog.records
    model.model.layers[0].experts = nn.Parameter(torch.zeros(4, 8, 32))
    quantize_linears(model, embeddings=False)
    assert caplog.messages == [
        "int8 leaves 4 KiB of LlamaForCausalLM as they are: they are in no linear layers"
    ]
    assert model.model.layers[0].experts.dtype == torch.float32


def test_embeddings_that_do_more_are_refused() -> None:
    model = tiny_model("gemma3_text", pad_token_id=0)  # scales what it looks up
    with pytest.raises(ModelError, match="quantize the layers alone"):
        quantize_linears(model, embeddings=True)


@pytest.fixture(scope="module")
def text(builtin_files: ModelFiles) -> list[int]:
    return Tokenizer.load(builtin_files).encode(TEXT.read_text("utf-8"))[: TOKENS + 1]


def load_builtin(files: ModelFiles, dtype: torch.dtype) -> Any:
    from cloud_engine.load import load_causal_lm

    return load_causal_lm(files, ModelStore(), device=torch.device("cpu"), dtype=dtype)


def windows(text: list[int]) -> Iterator[torch.Tensor]:
    for begin in range(0, len(text) - 1, WINDOW):
        yield torch.tensor([text[begin : begin + WINDOW + 1]])


def perplexity(model: Any, text: list[int]) -> float:
    with torch.inference_mode():
        losses = [
            nn.functional.cross_entropy(model(window[:, :-1]).logits[0], window[0, 1:])
            for window in windows(text)
        ]
    return math.exp(torch.stack(losses).mean())


@pytest.fixture(scope="module")
def exact_perplexity(builtin_files: ModelFiles, text: list[int]) -> float:
    return perplexity(load_builtin(builtin_files, torch.float32), text)


@pytest.mark.slow
@pytest.mark.parametrize("embeddings", [False, True])
def test_the_built_in_model_s_perplexity_rises_by_at_most_one_percent(
    builtin_files: ModelFiles, text: list[int], exact_perplexity: float, embeddings: bool
) -> None:
    model = load_builtin(builtin_files, torch.float32)
    quantize_linears(model, embeddings=embeddings)
    assert perplexity(model, text) <= 1.01 * exact_perplexity


@pytest.mark.slow
@pytest.mark.parametrize(("embeddings", "share"), [(False, 0.61), (True, 0.52)])
def test_the_built_in_model_s_weights_take_half_of_bfloat16_s_bytes(
    builtin_files: ModelFiles, embeddings: bool, share: float
) -> None:
    model = load_builtin(builtin_files, torch.bfloat16)
    whole = all_bytes(model)
    quantize_linears(model, embeddings=embeddings)
    assert all_bytes(model) <= share * whole


@pytest.mark.slow
def test_triton_s_kernel_has_the_same_product(tmp_path: Path) -> None:
    run_triton_script(COMPARISON, tmp_path, TRITON_INTERPRET="1")


# The interpreter has no bfloat16 products: it takes the numbers' bits for integers.
COMPARISON = """
import torch

from cloud_engine.int8 import multiply, quantize_rows
from cloud_engine.int8_kernel import multiply as kernel

torch.manual_seed(0)
for dtype, rounding in ((torch.float32, 1e-6), (torch.float16, 2**-10)):
    for count, outputs, width in ((1, 97, 66), (3, 33, 300), (17, 64, 256), (32, 5, 520)):
        rows = torch.randn(count, width).to(dtype)
        weight, scale = quantize_rows(torch.randn(outputs, width).to(dtype))
        found, wanted = kernel(rows, weight, scale), multiply(rows, weight, scale)
        assert found.dtype == dtype
        assert (found - wanted).abs().max() <= rounding * wanted.abs().max(), (dtype, count)
"""
