"""What a reader would paste from README and docs: commands can be read, code compiles, names exist.

Those that can run by themselves do, in tests/e2e/test_page_code.py and test_page_commands.py.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from typer.core import TyperCommand

from cli.calling import call
from pages import Block, blocks, typed


def _commands() -> Iterator[str]:
    for block in blocks("console"):
        for line in typed(block):
            yield from re.findall(r"^(?:\w+=\S+ )*shardwright (.*)", line)


COMMANDS = sorted({each for each in _commands() if "..." not in each})


def test_there_are_many() -> None:
    assert len(COMMANDS) >= 40


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_can_be_read(line: str, capsys: Any, monkeypatch: Any) -> None:
    """Up to the point where it would run."""
    monkeypatch.setattr(TyperCommand, "invoke", lambda self, context: None)
    words = shlex.split(line, comments=True)
    assert call(capsys, *words)[::2] == (0, "")


@pytest.mark.parametrize("block", list(blocks("python")), ids=str)
def test_code_compiles_and_its_names_exist(block: Block) -> None:
    import shardwright.torch as sw

    code = compile(block.text, "block", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = {
        node.attr
        for node in ast.walk(code)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sw"
    }
    if not block.page.startswith("tensorflow"):
        assert [name for name in sorted(names) if not hasattr(sw, name)] == []
    for node in ast.walk(code):
        name = str(node.module) if isinstance(node, ast.ImportFrom) else ""
        if name.startswith("shardwright") and "tensorflow" not in name:
            assert [each.name for each in node.names if not hasattr(import_module(name), each.name)] == []
