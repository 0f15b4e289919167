"""The nodes and tensors of a graph while it is put together."""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edge_engine.external_data import ExternalData

CONTRIB_DOMAIN = "com.microsoft"
_OPSET = 18
_IR_VERSION = 10


class GraphWriter:
    """Collects nodes, and writes tensors where `data` puts them.

    Args:
        data: Receives the bytes of the tensors.
    """

    def __init__(self, data: ExternalData) -> None:
        self._data = data
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: dict[str, onnx.TensorProto] = {}

    def tensor(self, name: str, array: NDArray[np.generic]) -> str:
        """Write a tensor and return its name; one that is there already stays as it is."""
        if name not in self._tensors:
            self._tensors[name] = self._data.add(name, array)
        return name

    def node(
        self,
        op: str,
        inputs: list[str],
        outputs: list[str],
        *,
        domain: str = "",
        **attributes: float | str,
    ) -> None:
        """Add a node, named after its first output."""
        node = helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes)
        self._nodes.append(node)

    def model(
        self, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        """Return the graph between `inputs` and `outputs`."""
        graph = helper.make_graph(
            self._nodes, "decoder", inputs, outputs, list(self._tensors.values())
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(CONTRIB_DOMAIN, 1)],
            ir_version=_IR_VERSION,
            producer_name="tidegate",
        )
