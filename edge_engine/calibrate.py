"""Find out how large each channel of a model is, and even out the channels before quantising.

The int8 kernels give 32 neighbouring activations one scale, so one large channel takes the
precision of the 31 beside it. Dividing each channel by a constant, and multiplying the weights
that read it by the same, changes nothing in exact arithmetic and evens the channels out
(SmoothQuant, arXiv 2211.10438). On the built-in model it halves the divergence from float32.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_engine.arch import LlamaShape
from edge_engine.manifest import GRAPH_FILE
from edge_engine.run_inputs import SLACK, Chunk, RunInputs, RunShape
from edge_engine.session import open_session
from edge_engine.weights import Weights, is_tied
from engine_core.errors import InvalidRequestError
from engine_core.models import ModelFiles
from engine_core.tokenizer import Tokenizer

SHARE_OF_ACTIVATIONS = 0.55
"""How much of the unevenness goes from the activations into the weights, 0 to 1.

Kullback-Leibler divergence of the built-in model from float32 on 2k tokens: 0.0030 without
smoothing, 0.0015 at 0.45, 0.0014 at 0.5 and from 0.6 to 0.65, 0.00135 at 0.55, 0.0039 at 1.
"""

# What a small model is asked every day: prose, facts, numbers, lists, code, a letter, Chinese.
CALIBRATION_TEXT = """\
The history of tea begins in ancient China, where the leaves were first used as medicine. Over \
the centuries it spread along trade routes to Japan, India and Europe.
def mean(values):
    total = 0
    for v in values:
        total += v
    return total / len(values)

Q: If a train travels 120 km in 1.5 hours, what is its average speed? A: 120 / 1.5 = 80 km/h.
In 1969, NASA landed two people on the Moon; about 650 million watched on television.
中国是世界上人口最多的国家之一,首都是北京。水在一百度时沸腾。
Dear Ms. Lopez, thank you for your letter of March 3rd. We are sorry to hear that the parcel \
arrived damaged and will send a replacement.
1. Wash the rice. 2. Boil water. 3. Add salt.
SELECT name, COUNT(*) FROM users GROUP BY name;
"""
_QUESTION = "Write a short poem about the sea."
_ANSWER = "The waves roll in, the waves roll out,\nA silver song, a distant shout."

# A channel that is never used must not be divided by zero.
_TINY = 1e-6
# Bounds the outputs of one run: a 7B model gives 3 MB of activations per token.
_TOKENS_AT_ONCE = 64


def calibration_ids(files: ModelFiles, limit: int) -> list[list[int]]:
    """Return the token ids of a text and of a conversation, at most `limit` of each.

    A model without a chat template gets the text alone.
    """
    tokenizer = Tokenizer.load(files)
    found = [tokenizer.encode(CALIBRATION_TEXT)]
    try:
        turn = tokenizer.encode_chat([{"role": "user", "content": _QUESTION}])
    except InvalidRequestError:
        pass
    else:
        found.append(turn + tokenizer.encode(_ANSWER))
    return [ids[:limit] for ids in found]


def watched_values(shape: LlamaShape) -> list[str]:
    """Return the graph's values that are smoothed; `edge_engine.emit` says what they are.

    The values of attention are not among them: heads share them, and it gains nothing.
    """
    layers = range(shape.layers)
    return [
        *(f"normed_{layer}" for layer in (*layers, shape.layers)),
        *(f"mlp_normed_{layer}" for layer in layers),
        *(f"product_{layer}" for layer in layers),
    ]


def channel_sizes(
    folder: Path, shape: LlamaShape, texts: Sequence[Sequence[int]], *, ragged: bool
) -> dict[str, NDArray[np.float32]]:
    """Run a graph whose watched values are outputs; return each channel's root mean square.

    Args:
        folder: Where the graph is.
        shape: The decoder that it is.
        texts: Token ids, none longer than the model's limit.
        ragged: Whether the graph has `query_seqlens`.
    """
    session = open_session(folder / GRAPH_FILE, threads=None)
    watched = watched_values(shape)
    squares = dict.fromkeys(watched, np.float64(0))
    for ids in texts:
        capacity = len(ids) + SLACK
        caches = {
            node.name: np.zeros((1, shape.kv_heads, capacity, shape.head_dim), np.float32)
            for node in session.get_inputs()
            if node.name.startswith("past_")
        }
        for begin in range(0, len(ids), _TOKENS_AT_ONCE):
            chunk = Chunk(0, begin, ids[begin : begin + _TOKENS_AT_ONCE])
            run = RunShape.of([chunk], ragged=ragged, logits=len(chunk.tokens))
            inputs = RunInputs(run, capacity=capacity, ragged=ragged)
            inputs.fill([chunk], [begin])
            for name, value in _run(session, inputs.arrays, caches, watched).items():
                rows = value.reshape(-1, value.shape[-1])
                squares[name] = squares[name] + np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
    tokens = sum(len(ids) for ids in texts)
    return {name: np.sqrt(total / tokens).astype(np.float32) for name, total in squares.items()}


def smoothing(
    weights: Weights, shape: LlamaShape, sizes: Mapping[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """Return what each channel of each watched value is to be divided by.

    `size(activation) ** a / size(weight) ** (1 - a)` with `a = SHARE_OF_ACTIVATIONS`, root mean
    squares for both, scaled to a geometric mean of 1.
    """
    divisors = {}
    for name, size in sizes.items():
        squares, rows = np.zeros(len(size)), 0
        for layer in _readers(name, weights, shape):
            weight = weights.read(f"{layer}.weight")
            squares += np.einsum("ij,ij->j", weight, weight, dtype=np.float64)
            rows += len(weight)
        of_weight = np.maximum(np.sqrt(squares / rows), _TINY)
        of_activation = np.maximum(size, _TINY)
        share = SHARE_OF_ACTIVATIONS
        divisor = of_activation**share / of_weight ** (1 - share)
        divisors[name] = (divisor / np.exp(np.log(divisor).mean())).astype(np.float32)
    return divisors


def _readers(name: str, weights: Weights, shape: LlamaShape) -> list[str]:
    """Return the linear layers that read a watched value."""
    kind, _, number = name.rpartition("_")
    prefix = f"model.layers.{number}."
    if kind == "mlp_normed":
        return [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"]
    if kind == "product":
        return [f"{prefix}mlp.down_proj"]
    if int(number) < shape.layers:
        return [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
    return ["model.embed_tokens" if is_tied(weights, shape) else "lm_head"]


def _run(
    session: ort.InferenceSession,
    feeds: Mapping[str, NDArray[np.generic]],
    caches: Mapping[str, NDArray[np.float32]],
    wanted: Sequence[str],
) -> dict[str, NDArray[np.float32]]:
    """Run one chunk, appending to the caches in place; return the wanted outputs."""
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    for name, cache in caches.items():
        value = ort.OrtValue.ortvalue_from_numpy(cache)
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(name.replace("past", "present"), value)
    for name in wanted:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    # Outputs come back in the order of binding.
    found = binding.get_outputs()[-len(wanted) :]
    return {name: value.numpy() for name, value in zip(wanted, found, strict=True)}
