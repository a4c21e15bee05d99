"""docs/commands.md tells of every command, and its examples of what needs no model are real."""

import re
from pathlib import Path

import pytest

from cli.calling import call
from shardwright.cli import COMMANDS
from shardwright.cluster.machine_file import read_cluster

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
    shown = re.search(r"```console\n\$ shardwright (schedule show[^\n]*)\n(.*?)```", document, re.DOTALL)
    assert shown is not None
    code, out, _ = call(capsys, *shown[1].split())
    assert (code, out) == (0, shown[2])


def test_the_machine_file_can_be_read(document, tmp_path):
    shown = re.search(r"```yaml\n(.*?)```", document, re.DOTALL)
    assert shown is not None
    (tmp_path / "machine.yaml").write_text(shown[1])
    assert read_cluster(tmp_path / "machine.yaml").device.memory_bytes == 40 * 2**30
