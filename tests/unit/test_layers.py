"""The layer rule: who may import whom, and what must stay free of torch.

Imports are read from the source, wherever they stand in a file, except those for type checking.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forerun

SRC = Path(forerun.__file__).parent

# Lower layers first. A module may import its own layer and those before it.
LAYERS: list[set[str]] = [
    {"errors", "env", "logs", "core", "options", "speculative_config", "config", "plan"}
    | {"gguf_file", "quantisation", "hidden_states", "shipped_drafters"},
    {"data", "tokenization", "budget", "cache", "attention", "kernels", "layers"},
    {"models"},
    {"drafters", "sampling"},
    {"verification"},
    {"engine", "profiling"},
    {"evaluation", "training"},
    {"transport"},
    {"server"},
    {"bench"},
    {"doctor"},
    {"commands", "cli", "__main__"},
]
# Stricter than the levels: the load generator knows the server by HTTP alone.
BENCH_MAY_IMPORT = {"bench", "errors", "env", "logs", "core", "config", "data"}
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}

TORCH_FREE = [
    "core",
    "plan",
    "config",
    "budget.controller",
    "budget.costs.files",
    "cache.block_pool",
    "cache.manager",
    "engine.scheduler",
    "engine.commit",
    "engine.engine",
    "engine.admission",
    "engine.detokenizer",
    "transport",
    "transport.async_engine",
    "tokenization",
    "quantisation.check",
    "quantisation.decode",
    "data",
    "data.bundled",
    "server.app",
    "cli",
]


def iter_imports(tree: ast.AST) -> set[str]:
    """Return the forerun modules a file imports at run time."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            found |= iter_imports(node)
    return {name for name in found if name.split(".")[0] == "forerun"}


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(SRC).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    assert own in LEVELS, f"{own} has no layer yet: add it to LAYERS"
    for module in iter_imports(ast.parse(path.read_text())):
        parts = module.split(".")
        if len(parts) > 1:
            assert LEVELS[parts[1]] <= LEVELS[own], f"{own} must not import {module}"


@pytest.mark.parametrize("path", sorted((SRC / "bench").rglob("*.py")), ids=lambda p: p.name)
def test_bench_imports_nothing_of_the_engine(path: Path) -> None:
    imported = {
        module.split(".")[1]
        for module in iter_imports(ast.parse(path.read_text()))
        if "." in module
    }
    assert imported <= BENCH_MAY_IMPORT


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_does_not_import_torch(module: str) -> None:
    code = f"import sys, forerun.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", sorted((SRC / "training").rglob("*.py")), ids=lambda p: p.name)
def test_training_knows_the_engine_by_its_offline_api_alone(path: Path) -> None:
    imported = iter_imports(ast.parse(path.read_text()))
    engine = {module for module in imported if module.startswith("forerun.engine")}
    assert engine <= {"forerun.engine.llm"}
