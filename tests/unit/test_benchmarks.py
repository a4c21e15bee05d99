"""Benchmarks that the suite doesn't run still import what the library has."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def imported(source: str) -> Iterator[tuple[str, str | None]]:
    """Modules of the library that `source` imports, with each name it takes from them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def missing(source: str) -> list[str]:
    found = []
    for module, name in imported(source):
        if module.split(".")[0] != "shardwright" or module.startswith("shardwright.tensorflow"):
            continue  # TensorFlow is in an environment of its own
        there = importlib.import_module(module)
        if name is not None and not hasattr(there, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ModuleNotFoundError:
                found.append(f"{module}.{name}")
    return found


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_imports_of_a_benchmark_are_there(path: Path) -> None:
    assert missing(path.read_text()) == []


def test_a_name_that_moved_is_found() -> None:
    assert missing("from shardwright.costs.memory import activation_bytes, in_flight") == [
        "shardwright.costs.memory.activation_bytes"
    ]
