"""Every reader of files against all that is no such file: one of our errors, at once, with the name."""

import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from observe.run_folders import run_folder

from shardwright.errors import ShardwrightError
from shardwright.observe.summary import summarize

from .good_files import READERS, Reader

_MOST_S = 5.0

CONTENTS = {
    "binary": bytes(range(256)),
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "zeros": b"\0" * 100,
    "a list": b"[]",
    "a number": b"7",
    "text": b'"text"',
    "html": b"<html></html>",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "digits": b"9" * 100_000,
    "a name twice": b'{"microbatches": 1, "microbatches": 2}',
    "no number": b'{"microbatches": NaN, "step": 1}',
    "an endless number": b'{"microbatches": 1e400, "step": 1}',
    "a number of 5000 digits": b'{"step": ' + b"9" * 5000 + b"}",
    "an escape": b'{"run_name": "\\u001b[2J", "model_type": "\\u001b[2J"}',
    "half a character": b'{"run_name": "\\ud800", "model_type": "\\ud800"}',
    "an unknown field": b'{"microbatchs": 4}',
}

PLACES: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "zeros without end": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: path.symlink_to("/dev/null"),
    "a socket": lambda path: _socket(path),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "a file that waits": lambda path: path.symlink_to("/proc/kmsg"),
    "a file of 4 GiB": lambda path: (path.touch(), os.truncate(path, 2**32)),
}

# Refused, too, like a parameter of a command line: without the file's name.
ELSEWHERE = {("smp.json", "an unknown field")}
WRONG = [
    pytest.param(reader, content, id=f"{reader}-{name}")
    for reader in READERS
    for name, content in CONTENTS.items()
    if (reader.name, name) not in ELSEWHERE
]


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def refusal(reader: Reader, folder: Path) -> str:
    start = time.monotonic()
    with pytest.raises(ShardwrightError) as refused:
        reader.read(folder)
    assert time.monotonic() - start < _MOST_S
    text = str(refused.value)
    assert reader.path(folder).name in text
    assert "\x1b" not in text
    assert len(text.splitlines()) <= 22
    return text


@pytest.mark.parametrize(("reader", "content"), WRONG)
def test_other_content(reader, content, tmp_path):
    reader.write(tmp_path)
    reader.path(tmp_path).write_bytes(content)
    refusal(reader, tmp_path)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reader", READERS, ids=str)
def test_something_else_than_a_file(reader, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    reader.write(tmp_path)
    path = reader.path(tmp_path)
    path.unlink()
    PLACES[place](path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(reader, tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


@pytest.mark.parametrize("reader", READERS, ids=str)
def test_a_mark_of_byte_order_is_passed_over(reader, tmp_path):
    reader.write(tmp_path)
    path = reader.path(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    reader.read(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": [1]}', "step is [1], but it must be a number"),
        ('{"step": 1, "train/loss": "low"}', "train/loss is 'low', but it must be a number"),
        ('{"step": 1, "time/step(s)": {}}', "time/step(s) is {}, but it must be a number"),
        ('{"step": "NaN"}', "step is nan, but it must be finite"),
    ],
)
def test_metrics_of_another_kind_name_the_field(tmp_path, line, message):
    """`shardwright runs` ended in a traceback where a metric was no number."""
    folder = run_folder(tmp_path / "run", None)
    (folder / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(ShardwrightError) as refused:
        summarize(folder)
    assert message in str(refused.value)
