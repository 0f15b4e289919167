"""What `cloud_gpu.py` measures: random weights, engines over them, and the memory they are in."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import torch
from timing import Times
from transformers import AutoModelForCausalLM, LlamaConfig

from cloud_engine.attention import ATTENTION
from cloud_engine.packed_model import PackedModel
from cloud_engine.runner import Runner, RunnerOptions
from engine_core.batch_engine import BatchEngine
from engine_core.batch_model import Choice
from engine_core.errors import StepMemoryError
from engine_core.scheduler import StepRow
from engine_core.types import GenerationRequest, Sampling, TextEvent

_BUFFER_BYTES = {"cuda": 2**32, "cpu": 2**28}
"""More than any last-level cache holds."""
_BUFFER_SECONDS = 0.5


def random_llama(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> Any:
    """Return a Llama of these sizes with random weights, which are made where they stay.

    It has no end token, so whoever generates with it, generates as much as it was asked for.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def weights_read(model: Any) -> int:
    """Return the bytes of weights that a step reads: all but the embeddings, a row per token."""
    embeddings: torch.Tensor = model.get_input_embeddings().weight
    return sum(weight.nbytes for weight in model.parameters()) - embeddings.nbytes


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Let transformers use its own attention for a while, in which no engine may step."""
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)


def generate_rate(model: Any, prompts: list[list[int]], new: int, **how: Any) -> float:
    """Return tokens per second of transformers' `generate`, greedy, prefill and all.

    Args:
        model: With its own attention.
        prompts: Of one length.
        new: Tokens after each.
        how: More of what `generate` takes.
    """
    began = time.perf_counter()
    ids = torch.tensor(prompts, device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **how
    )
    tokens = sum(map(len, out[:, ids.shape[1] :].tolist()))  # on the host, as ours are
    return tokens / (time.perf_counter() - began)


def memory_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that the device's memory moves, the best of all passes.

    The faster of reading, which adds up a buffer that no cache holds, and copying, which reads half
    of it and writes the other half. Decoding reads far more than it writes.
    """
    best = _best_pass(torch.ones(_BUFFER_BYTES[device.type] // 4, device=device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def _best_pass(buffer: torch.Tensor) -> float:
    source, target = buffer.chunk(2)
    best = 0.0
    for run in (buffer.sum, lambda: target.copy_(source)):
        run()
        _wait(buffer.device)
        deadline = time.perf_counter() + _BUFFER_SECONDS
        while (began := time.perf_counter()) < deadline:
            run()
            _wait(buffer.device)
            best = max(best, buffer.nbytes / (time.perf_counter() - began))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class WatchedRunner(Runner):
    """A runner that counts the steps that memory did not suffice for."""

    memory_errors = 0

    def step(self, rows: list[StepRow]) -> list[Choice]:
        """Compute tokens; see `Runner.step`."""
        try:
            return super().step(rows)
        except StepMemoryError:
            self.memory_errors += 1
            raise


class Marks:
    """The tokenizer of weights that know no words: each token is a mark, and none ends a turn."""

    eos_ids: frozenset[int] = frozenset()
    follows_grammars = False

    def stream(self, *, continues: bool) -> "Marks":  # noqa: ARG002 - a mark needs no space
        """Return what makes a text of marks, which needs no state."""
        return self

    def push(self, token_id: int) -> str:  # noqa: ARG002 - all are alike
        """Return a mark."""
        return "|"

    def flush(self) -> str:
        """Return nothing, since nothing is held back."""
        return ""


class Engine:
    """A batch engine, without the HTTP in front, over weights that others use too.

    Args:
        model: The weights.
        options: What the operator would choose.
        make: What makes the runner.
    """

    def __init__(
        self,
        model: PackedModel,
        options: RunnerOptions,
        make: Callable[[PackedModel, RunnerOptions], WatchedRunner] = WatchedRunner,
    ) -> None:
        self.runner: WatchedRunner
        self._make = lambda: make(model, options)
        self._engine = BatchEngine(model="random", load=self._load, tokenizer=Marks())

    async def start(self) -> None:
        """Plan the memory; capture graphs, if there are to be any, and check them."""
        await self._engine.start()

    async def close(self) -> None:
        """Free its graphs, keys and values, and let go of the weights."""
        await self._engine.close()
        del self.runner

    async def stream(self, prompt: list[int], new: int) -> AsyncGenerator[float, None]:
        """Generate greedily after a prompt that shares nothing; yield when each token came.

        In seconds of `time.perf_counter`.

        Raises:
            ApiError: the engine lost the request.
        """
        name = uuid.uuid4().hex
        request = GenerationRequest(
            id=name,
            prompt_ids=tuple(prompt),
            max_tokens=new,
            sampling=Sampling(temperature=0),
            cache_salt=name,
        )
        async with aclosing(self._engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, TextEvent):
                    yield time.perf_counter()

    async def run(self, prompts: list[list[int]], new: int) -> Times:
        """Generate after all prompts at once; return when each token came."""
        began = time.perf_counter()

        async def one(prompt: list[int]) -> list[float]:
            return [at - began async for at in self.stream(prompt, new)]

        return await asyncio.gather(*map(one, prompts))

    def _load(self) -> WatchedRunner:
        self.runner = self._make()
        return self.runner
