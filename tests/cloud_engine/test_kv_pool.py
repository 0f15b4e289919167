"""Memory for blocks on the host: shapes, and pages that come and go."""

import numpy as np
import pytest
import torch

from cloud_engine.kv_pool import KvPool
from cloud_engine.memory_plan import BLOCK_SIZE

PAGE = 4096
LAYERS = [(2, 32), (4, 16)]  # a page of float32 in each block


def pool_of(blocks: int, dtype: torch.dtype = torch.float32) -> KvPool:
    return KvPool(LAYERS, blocks=blocks, rows=3, width=5, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_layer_has_blocks_of_its_own_shape(dtype: torch.dtype) -> None:
    pool = pool_of(7, dtype)
    for part in (pool.keys, pool.values):
        assert [tuple(layer.shape) for layer in part] == [
            (7, BLOCK_SIZE, heads, size) for heads, size in LAYERS
        ]
        assert {layer.dtype for layer in part} == {dtype}
    parts = [*pool.keys, *pool.values]
    for number, layer in enumerate(parts):
        layer.fill_(number + 1)
    assert [float(layer.max()) for layer in parts] == [1, 2, 3, 4]  # none overlaps another


def test_the_host_writes_to_the_table_that_the_model_reads() -> None:
    pool = pool_of(7)
    pool.table[1, :2] = (6, 3)
    pool.send([1])
    assert pool.tables.dtype == torch.int32
    assert pool.tables.tolist() == [[0] * 5, [6, 3, 0, 0, 0], [0] * 5]
    assert pool.table.dtype == np.int32


def test_pages_come_as_blocks_are_written_and_go_when_they_are_released() -> None:
    pool = pool_of(1000)
    parts = (*pool.keys, *pool.values)
    assert pool.resident_bytes() == 0
    for block in (4, 5, 900):
        for part in parts:
            part[block] = block
    assert pool.resident_bytes() == 3 * len(parts) * PAGE
    pool.release([4, 900])
    assert pool.resident_bytes() == len(parts) * PAGE
    for part in parts:
        assert float(part[5].min()) == float(part[5].max()) == 5
        assert float(part[4].abs().max()) == 0
