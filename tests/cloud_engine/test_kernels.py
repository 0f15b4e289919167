"""The Triton kernels: equal to the reference in the interpreter, and machine code for a Hopper."""

from pathlib import Path

import pytest
from triton_script import run_triton_script

pytestmark = pytest.mark.slow


def test_the_interpreter_finds_what_the_reference_finds(tmp_path: Path) -> None:
    run_triton_script(COMPARISON, tmp_path, TRITON_INTERPRET="1")


def test_a_launch_depends_on_nothing_but_the_number_of_tokens(tmp_path: Path) -> None:
    run_triton_script(LAUNCHES, tmp_path, TRITON_INTERPRET="1")


def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """With tensor cores, loads that run ahead, and no spills of registers."""
    run_triton_script(COMPILATION, tmp_path)


MADE_UP = """
import torch

from cloud_engine import attention, kernels

BLOCK_SIZE = 16


def made_up(dtype, heads, kv_heads, size, tokens, longest):
    \"\"\"Write two sequences and the trash block; return queries at random places of them.\"\"\"
    blocks = torch.randperm(2 * longest).int().view(2, longest) + 1
    tables = torch.cat([blocks, torch.zeros(1, longest, dtype=torch.int32)])
    shape = (2 * longest + 1, BLOCK_SIZE, kv_heads, size)
    keys, values = torch.full((2, *shape), float("nan")).to(dtype)
    rows = torch.randint(0, 3, (tokens,)).int()
    contexts = torch.randint(1, longest * BLOCK_SIZE + 1, (tokens,)).int()
    contexts[rows == 2] = 1
    for row in range(3):
        length = int(max(contexts[rows == row], default=0))
        place = torch.arange(length)
        slots = (tables[row, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE).long()
        # As models hand them over: heads outside, or cut from a wider product.
        key = torch.randn(kv_heads, length, size).to(dtype).transpose(0, 1)
        value = torch.randn(length, kv_heads, 3 * size).to(dtype)[..., size : 2 * size]
        wanted = keys.clone(), values.clone()
        attention.write(key, value, slots, *wanted)
        if length:
            kernels.write(key, value, slots, keys, values)
        for found, want in zip((keys, values), wanted):
            torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    query = torch.randn(heads, tokens, size).to(dtype).transpose(0, 1)
    where = {"tables": tables, "table_rows": rows, "contexts": contexts}
    return query, keys, values, where
"""

COMPARISON = (
    MADE_UP
    + """
# Without bfloat16: the interpreter's products take its bits for integers.
torch.manual_seed(0)
for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
    for heads, kv_heads, size, tokens, longest, window in (
        (4, 2, 64, 5, 9, None),
        (3, 3, 80, 3, 5, None),
        (9, 3, 64, 3, 6, 7),
        (8, 1, 96, 1, 12, None),
        (20, 1, 128, 2, 9, 50),
        (2, 1, 256, 2, 4, None),
        (4, 4, 16, 64, 2, None),  # more programs than a GPU asks for: one split
    ):
        query, keys, values, where = made_up(dtype, heads, kv_heads, size, tokens, longest)
        call = {"scale": size**-0.5, "window": window, **where}
        found = kernels.attend(query, keys, values, **call)
        wanted = attention.attend(query, keys, values, **call)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
"""
)

LAUNCHES = (
    MADE_UP
    + """
launches = []


class FakeKernel:
    \"\"\"Records what a launch gets besides tensors, whose addresses and shapes are the graph's.\"\"\"

    def __getitem__(self, grid):
        def launch(*places, **names):
            rest = [place.shape if torch.is_tensor(place) else place for place in places]
            launches.append((grid, rest, names))

        return launch


kernel_names = ("_attend_split", "_merge", "_write")
query, keys, values, where = made_up(torch.float32, 4, 2, 64, 6, 9)
for name in kernel_names:
    setattr(kernels, name, FakeKernel())
seen = []
for contexts in (where["contexts"], torch.full((6,), 3).int()):
    for rows in (where["table_rows"], torch.full((6,), 2).int()):
        call = {"tables": where["tables"], "table_rows": rows, "contexts": contexts}
        kernels.write(query[:, :2], query[:, :2], contexts, keys, values)
        kernels.attend(query, keys, values, scale=0.125, window=None, **call)
        seen.append(launches.copy())
        launches.clear()
assert len(seen[0]) == len(kernel_names)
assert all(one == seen[0] for one in seen)
"""
)

COMPILATION = """
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cloud_engine import kernels

TENSORS = {"tables": "i32", "table_rows": "i32", "contexts": "i32", "slots": "i64"}
TENSORS |= {"partial": "fp32", "weights": "fp32"}
NUMBERS = {"query", "key", "value", "keys_cache", "values_cache", "out"}


def compile_for_hopper(kernel, dtype, constants, **options):
    names = kernel.arg_names
    types = {"scale": "fp32"} | {name: "i32" for name in names if name.endswith("stride")}
    types |= {name: f"*{kind}" for name, kind in TENSORS.items()}
    types |= {name: f"*{dtype}" for name in NUMBERS}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        # What the launcher sees of tensors that torch has allocated.
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if signature[name].startswith("*")
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


for dtype, size, kv_heads, group, window, keys in (
    ("bf16", 128, 32, 1, None, 64),  # Llama 2 7B
    ("bf16", 128, 8, 4, 4096, 64),  # Mistral 7B
    ("fp16", 256, 4, 2, None, 32),
    ("fp32", 80, 8, 1, None, 32),
):
    padded = triton.next_power_of_2(size)
    shared = {"window": window, "size": size, "padded": padded, "keys": keys}
    heads = {"kv_heads": kv_heads, "group": group, "rows": 16, "block_size": 16}
    split = compile_for_hopper(
        kernels._attend_split, dtype, shared | heads, num_warps=4, num_stages=2
    )
    merge = compile_for_hopper(kernels._merge, dtype, shared | {"splits": 64})
    cell = triton.next_power_of_2(kv_heads * size)
    compile_for_hopper(
        kernels._write, dtype, {"kv_heads": kv_heads, "size": size, "cell": cell}
    )
    assert "cp.async" in split.asm["ptx"]
    assert ("mma.sync" in split.asm["ptx"]) == (dtype != "fp32")
    assert split.metadata.shared <= 51 * 1024, split.metadata.shared
    for kernel in (split, merge):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as code:
            code.write(kernel.asm["cubin"])
            code.flush()
            usage = subprocess.check_output(
                [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", code.name], text=True
            )
        assert "LOCAL:0 " in usage and "STACK:0 " in usage, usage
"""
