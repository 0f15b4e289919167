"""Find out what goes into the linear layers of a model, from a text that is asked every day."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_engine.arch import LlamaShape
from edge_engine.manifest import GRAPH_FILE
from edge_engine.run_inputs import SLACK, Chunk, RunInputs, RunShape
from edge_engine.session import open_session
from engine_core.errors import InvalidRequestError
from engine_core.models import ModelFiles
from engine_core.tokenizer import Tokenizer

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
    """Return the values that linear layers read; `edge_engine.emit` says what they are."""
    layers = range(shape.layers)
    kinds = ("normed", "attended_rows", "mlp_normed", "product")
    return [*(f"{kind}_{layer}" for kind in kinds for layer in layers), f"normed_{shape.layers}"]


def activations(
    folder: Path, shape: LlamaShape, texts: Sequence[Sequence[int]], *, ragged: bool
) -> dict[str, NDArray[np.float32]]:
    """Run a graph whose watched values are outputs; return their rows, `[tokens, channels]`.

    Takes 0.4 MB per token with the built-in model, 3 MB with one of 7 billion parameters.

    Args:
        folder: Where the graph is.
        shape: The decoder that it is.
        texts: Token ids, none longer than the model's limit.
        ragged: Whether the graph has `query_seqlens`.
    """
    session = open_session(folder / GRAPH_FILE, threads=None)
    watched = watched_values(shape)
    found: dict[str, list[NDArray[np.float32]]] = {name: [] for name in watched}
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
                found[name].append(value)
    return {name: np.concatenate(rows) for name, rows in found.items()}


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
