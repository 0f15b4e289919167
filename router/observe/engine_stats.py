"""What child engines say about themselves, as metrics: their last `GET /engine/stats`, field by field."""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PREFIX = "tidegate_engine_"
_NUMBERED = re.compile(r"(\w+)_(\d+)")
"""`graph_hits_8`: one of a family, and the size that tells it from the others."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class EngineStats(Collector):
    """The latest stats of each engine; numbers only, since text would make labels without end.

    A field `x` becomes `tidegate_engine_x`; one that ends in `_total` is a counter. Those of
    `memory` become `tidegate_engine_memory_bytes` with a label `part`.
    """

    def __init__(self) -> None:
        self._latest: dict[str, Mapping[str, object]] = {}

    def note(self, target: str, stats: Mapping[str, object] | None) -> None:
        """Keep an engine's stats, or forget them when it is down."""
        if stats is None:
            self._latest.pop(target, None)
        else:
            self._latest[target] = stats

    def collect(self) -> Iterator[Metric]:
        """Yield every number of every engine."""
        families: dict[str, Metric] = {}
        labelled: dict[str, tuple[str, ...]] = {}
        for target, stats in self._latest.items():
            told: set[tuple[str, ...]] = set()
            for name, labels, value in _numbers(stats):
                sample = (name, *labels.values())
                # A page with a sample twice, or with labels that differ, is refused as a whole.
                if sample in told or labelled.setdefault(name, tuple(labels)) != tuple(labels):
                    continue
                told.add(sample)
                family = families.get(name) or families.setdefault(name, _family(name, labels))
                family.add_metric([target, *labels.values()], value)  # type: ignore[attr-defined]
        yield from families.values()


def _numbers(stats: Mapping[str, object]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield names, labels beside the target's, and values."""
    for name, value in stats.items():
        if name == "memory" and isinstance(value, dict):
            for part, size in value.items():
                if _is_number(size):
                    yield "memory_bytes", {"part": part}, float(size)
        elif name == "details" and isinstance(value, dict):
            yield from _numbers(value)
        elif _is_number(value) and _NAME.fullmatch(name):
            if numbered := _NUMBERED.fullmatch(name):
                yield f"{numbered[1]}_total", {"size": numbered[2]}, float(value)
            else:
                yield name, {}, float(value)


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number that a float can hold; JSON knows larger ones."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _family(name: str, labels: Mapping[str, str]) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    words = name.removesuffix("_total").replace("_", " ")
    return kind(_PREFIX + name, f"The engine's own figure: {words}.", labels=("target", *labels))
