"""llama.cpp through llama-cpp-python's bindings of its C interface, on a Q8_0 GGUF file.

Not through the `Llama` class, which copies the logits of every step into its own array.
"""

import importlib.metadata
import time

import llama_cpp
from protocol import Run, Times, serve

SEQUENCES = 8
CONTEXT = 1024
"""Tokens of room that each sequence has."""


def load(model: str, threads: int) -> tuple[str, Run]:
    """Load the model; see `protocol.serve`."""
    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(
        model.encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = SEQUENCES * CONTEXT
    params.n_seq_max = SEQUENCES
    params.n_batch = params.n_ctx
    params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(loaded, params)
    memory = llama_cpp.llama_get_memory(context)
    greedy = llama_cpp.llama_sampler_init_greedy()
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def step(rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute rows of (token, position, sequence, whether its logits are wanted)."""
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wanted
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")

    def run(prompts: list[list[int]], max_tokens: int) -> Times:
        llama_cpp.llama_memory_clear(memory, False)
        length = len(prompts[0])
        rows = [
            (token, position, sequence, position == length - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last = range(length - 1, len(rows), length)
        times: list[float] = []
        began = time.perf_counter()
        step(rows)
        while True:
            drawn = [llama_cpp.llama_sampler_sample(greedy, context, row) for row in last]
            times.append(time.perf_counter() - began)
            if len(times) == max_tokens:
                return [times] * len(prompts)
            position = length + len(times) - 1
            step([(token, position, sequence, True) for sequence, token in enumerate(drawn)])
            last = range(len(drawn))

    return f"llama.cpp ({importlib.metadata.version('llama-cpp-python')})", run


if __name__ == "__main__":
    serve(load)
