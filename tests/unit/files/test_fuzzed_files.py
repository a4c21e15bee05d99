"""Files that were changed at random: a reader takes what is right, and tells the rest in one of our errors.

What a file holds is changed value by value: left out, of another kind, huge, deep; or its bytes are.
"""

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ShardwrightError
from shardwright.text import printable

from .good_files import READERS, Reader

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
