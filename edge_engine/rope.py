"""Rotary position tables: the scaling rules that the graph emitter knows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies are stretched for long contexts.

    `linear` divides every frequency by `factor`. `llama3` leaves high frequencies alone, divides
    low ones by `factor` and blends between (transformers' `_compute_llama3_parameters`).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def rope_scaling(table: Mapping[str, Any] | None) -> RopeScaling | None:
    """Read `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5) of a config.

    Raises:
        ValueError: a rule that is not known here, such as yarn or longrope.
    """
    if not table:
        return None
    # "type" is what configs before transformers 4.43 wrote.
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return RopeScaling(kind="linear", factor=float(table["factor"]))
        if kind == "llama3":
            return RopeScaling(
                kind="llama3",
                factor=float(table["factor"]),
                low_freq_factor=float(table["low_freq_factor"]),
                high_freq_factor=float(table["high_freq_factor"]),
                original_max_position=int(table["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ValueError(f"rope scaling {kind} without {error}") from None
    raise ValueError(f"rope scaling {kind}")


def cos_sin_tables(
    theta: float, head_dim: int, positions: int, scaling: RopeScaling | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cos and sin of shape `[positions, head_dim / 2]`.

    Everything is float32, as in transformers: models were trained with its rounding, which at
    position 8000 is a visible part of a radian.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    return np.cos(angles), np.sin(angles)


def _scaled(frequencies: NDArray[np.float32], scaling: RopeScaling) -> NDArray[np.float32]:
    if scaling.kind == "linear":
        return frequencies / np.float32(scaling.factor)
    wavelength = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    blend = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    stretched = frequencies / scaling.factor
    between = (1 - blend) * stretched + blend * frequencies
    scaled = np.where(
        wavelength > low, stretched, np.where(wavelength < high, frequencies, between)
    )
    return scaled.astype(np.float32)
