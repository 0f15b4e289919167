"""How an emitted graph multiplies with a weight."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_engine.graph_writer import GraphWriter


class Linear(Protocol):
    """Writes `name = value @ weight.T + bias` into a graph."""

    def __call__(
        self,
        graph: GraphWriter,
        name: str,
        value: str,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None,
    ) -> None:
        """Write one product.

        Args:
            graph: Where to.
            name: The result, `[rows, N]`.
            value: Activations `[rows, K]`; `edge_engine.emit` lists what may be asked about them.
            weight: `[N, K]`.
            bias: `[N]`, if there is one.
        """
        ...


def float_linear(
    graph: GraphWriter,
    name: str,
    value: str,
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
) -> None:
    """Multiply in float32; see `Linear`."""
    product = before_bias(name, bias)
    graph.node("MatMul", [value, graph.tensor(f"{name}_weight", weight.T)], [product])
    add_bias(graph, name, bias)


def before_bias(name: str, bias: NDArray[np.float32] | None) -> str:
    """Return the name of what `add_bias` makes `name` of; without a bias they are the same."""
    return name if bias is None else f"{name}_product"


def add_bias(graph: GraphWriter, name: str, bias: NDArray[np.float32] | None) -> None:
    """Write `name = before_bias(name, bias) + bias`, if there is a bias."""
    if bias is not None:
        addends = [before_bias(name, bias), graph.tensor(f"{name}_bias", bias)]
        graph.node("Add", addends, [name])
