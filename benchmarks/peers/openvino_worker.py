"""OpenVINO GenAI: its continuous batching pipeline, on a Q8_0 GGUF file."""

import importlib.metadata
import time

import numpy as np
import openvino
import openvino_genai
from protocol import Run, Times, serve

PREFILL_TOKENS = 512
"""Prompt tokens per step; the pipeline's own default of 256 is slower at prompts of 512."""


def load(model: str, threads: int) -> tuple[str, Run]:
    """Load the model; see `protocol.serve`."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = PREFILL_TOKENS
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )

    def run(prompts: list[list[int]], max_tokens: int) -> Times:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        tensors = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        times: Times = [[] for _ in prompts]
        began = time.perf_counter()
        handles = [
            pipeline.add_request(number, tensor, config) for number, tensor in enumerate(tensors)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - began
            for handle, seen in zip(handles, times, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        seen.extend([now] * len(output.generated_ids))
        return times

    return f"OpenVINO GenAI {importlib.metadata.version('openvino-genai')}", run


if __name__ == "__main__":
    serve(load)
