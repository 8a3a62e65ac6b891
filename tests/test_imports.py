"""Imports run one way: jobs -> capture -> store, and store/ needs neither torch nor Ray."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

ENGINE = {"torch", "ray", "vllm", "nnsight", "transformers"}
FORBIDDEN = {
    "store": ENGINE | {"capture", "jobs"},
    "capture": {"ray", "jobs"},
    "jobs": set(),
}
TORCH_ADAPTER = Path("store/torch_adapter.py")
PRIVATE_API = {"tests", "benchmarks", "examples"}


def imports(tree: ast.AST, *, inside_functions: bool = True) -> Iterator[tuple[str, int]]:
    """Yield (dotted module, line) for every import; `if TYPE_CHECKING:` counts like any other."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            module = node.module or ""
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if inside_functions:
                yield from imports(node)
        else:
            yield from imports(node, inside_functions=inside_functions)


def modules(package: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))


def parsed(path: Path) -> ast.AST:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{path}:{line} imports {module}"
        for path in modules(package)
        for module, line in imports(parsed(path))
        if module.split(".")[0] in FORBIDDEN[package]
        and not (path == TORCH_ADAPTER and module.split(".")[0] == "torch")
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_torch_adapter() -> None:
    wrong = [
        f"{path}:{line}"
        for package in FORBIDDEN
        for path in modules(package)
        for module, line in imports(parsed(path))
        if module == "store.torch_adapter"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_product_does_not_import_its_tests() -> None:
    wrong = [
        f"{path}:{line} imports {module}"
        for package in FORBIDDEN
        for path in modules(package)
        for module, line in imports(parsed(path))
        if module.split(".")[0] in PRIVATE_API
    ]
    assert not wrong, "\n".join(wrong)


def test_the_check_sees_imports_of_every_form() -> None:
    source = (
        "import torch.nn as nn\n"
        "from ray import get\n"
        "def f():\n    from store import torch_adapter\n"
        "class A:\n    import vllm\n"
        "if True:\n    import jobs.cli\n"
    )
    found = {module for module, _ in imports(ast.parse(source))}
    assert {"torch.nn", "ray", "store.torch_adapter", "vllm", "jobs.cli"} <= found
    shallow = {module for module, _ in imports(ast.parse(source), inside_functions=False)}
    assert "store.torch_adapter" not in shallow
    assert {"torch.nn", "ray", "vllm", "jobs.cli"} <= shallow


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after `statement`."""
    script = f"{statement}\nimport sys\nprint(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        ".".join(path.with_suffix("").parts)
        for path in modules("store")
        if path != TORCH_ADAPTER and path.name in ("__init__.py", "run.py", "zarr_bfloat16.py")
    ],
)
def test_reading_loads_no_engine(module: str) -> None:
    loaded = loaded_by(f"import {module.removesuffix('.__init__')}")
    assert not loaded & (ENGINE | {"capture", "jobs"})
