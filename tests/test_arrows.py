"""The import arrows of docs/architecture.md, held by reading every import in the tree."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("router", "edge_engine", "cloud_engine", "engine_core", "policies")

# room -> the rooms of ours that it may import; a longer name wins over a shorter one.
ALLOWED: dict[str, tuple[str, ...]] = {
    "policies": ("engine_core.errors",),
    "engine_core": (),
    "edge_engine": ("engine_core",),
    "cloud_engine": ("engine_core",),
    "router.guard": (),
    "router.decide": ("policies", "engine_core.errors", "engine_core.openai"),
    "router.targets": ("router.guard", "engine_core.errors"),
    "router.observe": ("router.guard",),
    "router.api": (
        "router.decide",
        "router.guard",
        "router.targets",
        "router.observe",
        "engine_core.errors",
        "engine_core.http_log",
        "engine_core.openai",
        "engine_core.urgency",
    ),
    "router": ("router", "policies", "engine_core"),
}


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def inside(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_follow_the_arrows(path: Path) -> None:
    module = module_of(path)
    room = max((r for r in ALLOWED if inside(module, r)), key=len)
    ours = {name for name in imports(path) if name.split(".")[0] in ROOMS}
    allowed = (room, *ALLOWED[room])
    strangers = {n for n in ours if not any(inside(n, a) for a in allowed)}
    assert not strangers, f"{module} may import {allowed}, not {sorted(strangers)}"


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_torch_is_named_only_in_the_cloud_engine_and_the_export_process(path: Path) -> None:
    module = module_of(path)
    if inside(module, "cloud_engine") or module == "edge_engine.optimum_export":
        return
    heavy = {n for n in imports(path) if n.split(".")[0] in ("torch", "transformers", "optimum")}
    assert not heavy


@pytest.mark.parametrize("module", ["router.app", "router.cli", "edge_engine.__main__"])
def test_router_and_edge_engine_load_without_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False"


PURE = [p for p in sources() if module_of(p).startswith(("router.decide", "router.guard"))]


@pytest.mark.parametrize("path", PURE, ids=module_of)
def test_decide_and_guard_read_no_clock_and_do_no_io(path: Path) -> None:
    forbidden = {"time", "asyncio", "socket", "subprocess", "threading", "aiohttp", "os", "random"}
    assert not {n.split(".")[0] for n in imports(path)} & forbidden
