"""docs/commands.md tells of every command, and its examples of what needs no model are real."""

import re
from pathlib import Path

import pytest

from cli.calling import call
from shardwright.cli import COMMANDS

DOCUMENT = Path(__file__).parents[3] / "docs" / "commands.md"


@pytest.fixture
def document():
    return DOCUMENT.read_text()


def test_every_command_is_told_of(document):
    for command in COMMANDS:
        inner = [c.name for c in command.load().registered_commands] if command.is_group else [""]
        for name in inner:
            assert f"| `{f'{command.name} {name}'.strip()}` |" in document


def test_examples_print_what_the_document_says(capsys, document):
    shown = re.search(r"```console\n\$ shardwright (schedule [^\n]*)\n(.*?)```", document, re.DOTALL)
    assert shown is not None
    code, out, _ = call(capsys, *shown[1].split())
    assert (code, out) == (0, shown[2])
