"""CUDA Graphs: a step's kernels, recorded once and launched again in one call."""

from collections.abc import Callable

import torch

from cloud_engine.graphs import Outputs

_WARM_UPS = 2
"""One compiles kernels and makes the libraries' workspaces; what is tuned then runs once more as it
will be captured. Either of them inside a capture would break it."""


class CudaCapture:
    """Captures steps on one side stream and into one pool of memory.

    The graphs of a pool use the same memory for what they compute, so they must run one after
    another, and the outputs of one are gone when the next one runs. Larger graphs go first, for
    the smaller ones then fit into what those have taken.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        """Run a step to warm up and record it; see `graphs.Capture`."""
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    step()
            # In the mode of this thread alone, others may talk to the GPU meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                outputs = step()
        finally:
            # Also after a failure: the next capture, or an eager step, begins on an idle GPU.
            torch.cuda.synchronize(self._device)
        # On the stream of whoever replays, which is that of the eager steps: so all of them, and
        # the copies of their inputs, are in order.
        return outputs, graph.replay
