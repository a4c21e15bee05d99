"""Every reader of files against all that is no such file: one of our errors, at once, with the name.

Files that were changed at random: a reader takes what is right, and tells the rest in one of our errors.

What a file holds is changed value by value: left out, of another kind, huge, deep; or its bytes are.
"""

import json
import os
import random
import resource
import socket
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from observe.run_folders import run_folder

from shardwright.errors import ShardwrightError
from shardwright.observe.report import gather
from shardwright.observe.summary import summarize
from shardwright.text import printable

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


@pytest.mark.parametrize("read", [summarize, gather])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": [1]}', "step is [1], but it must be a whole number"),
        ('{"step": 1, "train/loss": "low"}', "train/loss is 'low', but it must be a number"),
        ('{"step": 1, "time/step(s)": {}}', "time/step(s) is {}, but it must be a number"),
        ('{"step": "NaN"}', "step is 'NaN', but it must be a whole number"),
        ('{"step": 1, "memory/peak_by_rank(GiB)": 3}', "(GiB) is 3, but it must be a list"),
    ],
)
def test_metrics_of_another_kind_name_the_field(tmp_path, line, message, read):
    """`shardwright runs` ended in a traceback where a metric was no number."""
    folder = run_folder(tmp_path / "run", None)
    (folder / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(ShardwrightError) as refused:
        read(folder)
    assert message in str(refused.value)


STRANGE = st.sampled_from(
    [
        *(None, True, False, "", "x", "4", "NaN", "\x1b[2J", "\u202e", "a\nb", "\ud800", "/dev/zero", [], {}),
        *(0, -1, 1, 2, 1.5, 1e30, 1e300, -1e300, 5e-324, float("nan"), float("inf"), 2**31, 2**63, 10**18),
        *(10**29, 10**40, 10**4000, [[]], {"a": 1}, [1, 2], ["x"], {"": []}, [[[[[[]]]]]], "9" * 5000),
    ]
).map(deepcopy)


def changed(document: Any, data: st.DataObject) -> Any:
    """The document with some of its values, or keys, changed."""
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        places = list(places_in(document))
        if not places:
            return data.draw(STRANGE)
        around, key = places[data.draw(st.integers(0, len(places) - 1), label="place")]
        how = data.draw(st.sampled_from(["value", "value", "value", "gone", "renamed", "again"]), label="how")
        if how == "value":
            around[key] = data.draw(STRANGE, label="value")
        elif how == "gone":
            del around[key]
        elif how == "renamed" and isinstance(around, dict):
            around[f"{key}s"] = around.pop(key)
        elif isinstance(around, list):
            around.append(deepcopy(around[key]))
    return document


def places_in(document: Any):
    """Each object or list in a document, with each of its keys."""
    keys = (
        document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    )
    for key in list(keys):
        yield document, key
        yield from places_in(document[key])


def written(reader: Reader, document: Any, lines: bool) -> bytes:
    if lines:
        return b"".join(json.dumps(line).encode() + b"\n" for line in document)
    if reader.name.endswith(".yaml"):
        try:
            return yaml.safe_dump(document, sort_keys=False).encode("utf-8", "surrogatepass")
        except ValueError:  # of a number that Python does not write
            return b"a: " + b"9" * 5000
    return dumped(document).encode()


def dumped(document: Any) -> str:
    try:
        return json.dumps(document)
    except ValueError:
        return '{"a": ' + "9" * 5000 + "}"


def loaded(reader: Reader, content: bytes) -> tuple[Any, bool]:
    if reader.name.endswith(".jsonl"):
        return [json.loads(line) for line in content.splitlines()], True
    return (yaml.safe_load if reader.name.endswith(".yaml") else json.loads)(content), False


def read(reader: Reader, folder: Path) -> None:
    """Either it is taken, or it is one of our errors, and short."""
    try:
        reader.read(folder)
    except ShardwrightError as error:
        text = str(error)
        assert len(text.splitlines()) <= 25
        assert printable(text, lines=True) == text
        assert len(text) < 20_000


DOCUMENTS = READERS


@pytest.mark.parametrize("reader", DOCUMENTS, ids=str)
def test_values_that_were_changed(reader, tmp_path):
    reader.write(tmp_path)
    path = reader.path(tmp_path)
    good = path.read_bytes()

    @given(st.data())
    @settings(max_examples=60)
    def check(data):
        document, lines = loaded(reader, good)
        path.write_bytes(written(reader, changed(document, data), lines))
        read(reader, tmp_path)

    check()


@pytest.mark.parametrize("reader", READERS, ids=str)
def test_bytes_that_were_changed(reader, tmp_path):
    reader.write(tmp_path)
    path = reader.path(tmp_path)
    good = path.read_bytes()

    @given(st.integers(0, 2**32), st.sampled_from(["flip", "cut", "insert", "twice"]))
    @settings(max_examples=60)
    def check(seed, how):
        chance = random.Random(seed)
        at, end = sorted((chance.randrange(len(good)), chance.randrange(len(good))))
        middle = {
            "flip": bytes(chance.randrange(256) for _ in good[at : min(end, at + 4)]),
            "cut": b"",
            "insert": chance.choice(
                [b"{", b"]", b'"', b"\n", b"\0", b"9" * 99, b"\xff", b": *a", b"e400", b"-"]
            ),
            "twice": good[at:end] * 2,
        }[how]
        path.write_bytes(good[:at] + middle + good[end if how != "flip" else min(end, at + 4) :])
        read(reader, tmp_path)

    check()
