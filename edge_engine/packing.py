"""Weights as this machine's kernels want them, stored in a graph's data file.

At load the runtime rearranges the weights of most products. By default it does so in private memory,
so that every engine process has a whole copy. A graph saved with the rearranged weights maps them
from the file, where all processes share them and the kernel may drop and reread them.

The runtime still rearranges each weight at load, and takes the stored form only if it is the same;
one from another processor costs memory, never right numbers.
"""

import platform
import re
from pathlib import Path

import onnx
import onnxruntime as ort

from edge_engine.manifest import DATA_FILE, GRAPH_FILE
from edge_engine.session import session_options

_CPU_INFO = Path("/proc/cpuinfo")
# What MLAS looks at to choose its kernels, and with them the form of packed weights.
_INSTRUCTION_SET = re.compile(
    r"avx\w*|amx\w*|fma|f16c|asimd\w*|fphp|i8mm|bf16|sve\w*|sme2?", re.ASCII
)

_SINCE = (1, 32)
"""The first version that stores the weights of MatMulNBits right; with 1.31.1 they become NaN."""


def pack_weights(folder: Path) -> None:
    """Rewrite a folder's graph and data file with packed weights beside the plain ones.

    The data file grows by the bytes of the packed weights, a little more than those of the plain
    ones that they stand for. A graph whose weights this runtime would store wrongly is left as it
    is.

    Raises:
        Exception: what the runtime raises for a graph it cannot load.
    """
    graph = onnx.load(folder / GRAPH_FILE, load_external_data=False).graph
    version = tuple(map(int, ort.__version__.split(".")[:2]))
    if version < _SINCE and any(node.op_type == "MatMulNBits" for node in graph.node):
        return
    packed = folder / "packed"
    packed.mkdir()
    options = session_options(threads=None)
    options.optimized_model_filepath = str(packed / GRAPH_FILE)
    for key, value in (
        ("optimized_model_external_initializers_file_name", DATA_FILE),
        ("optimized_model_external_initializers_min_size_in_bytes", "1024"),
        ("save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(f"session.{key}", value)
    ort.InferenceSession(str(folder / GRAPH_FILE), options, providers=["CPUExecutionProvider"])
    for name in (DATA_FILE, GRAPH_FILE):
        (packed / name).replace(folder / name)
    packed.rmdir()


def packing_key(cpu_info: Path = _CPU_INFO) -> str:
    """Return a name for everything that decides how weights are packed here.

    That is the runtime's version and the processor's instruction sets.

    Args:
        cpu_info: The kernel's description of the processors.
    """
    try:
        lines = cpu_info.read_text("utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    words = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    sets = sorted(filter(_INSTRUCTION_SET.fullmatch, words))
    return "-".join([ort.__version__, platform.machine(), *sets])
