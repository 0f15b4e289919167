"""onnxruntime-genai, on the INT8 folder that its own builder makes."""

import importlib.metadata
import json
import time

import numpy as np
import onnxruntime_genai
from protocol import Run, Times, serve


def load(model: str, threads: int) -> tuple[str, Run]:
    """Load the model; see `protocol.serve`."""
    config = onnxruntime_genai.Config(model)
    options = {"intra_op_num_threads": threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    loaded = onnxruntime_genai.Model(config)

    def run(prompts: list[list[int]], max_tokens: int) -> Times:
        length = len(prompts[0]) + max_tokens
        params = onnxruntime_genai.GeneratorParams(loaded)
        params.set_search_options(
            batch_size=len(prompts), max_length=length, min_length=length, do_sample=False
        )
        ids = np.array(prompts, np.int32)
        times = []
        began = time.perf_counter()
        generator = onnxruntime_genai.Generator(loaded, params)
        generator.append_tokens(ids)
        for _ in range(max_tokens):
            generator.generate_next_token()
            times.append(time.perf_counter() - began)
        return [times] * len(prompts)

    return f"onnxruntime-genai {importlib.metadata.version('onnxruntime-genai')}", run


if __name__ == "__main__":
    serve(load)
