"""What ranks tell each other is data: it comes back as it was, and nothing that a stranger writes is run."""

import contextlib
import dataclasses
import math
import pickle
from collections import OrderedDict
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.collectives.prices import DEFAULT_PRICES
from shardwright.comm.codec import declare
from shardwright.comm.tensor_codec import DecodeError, decode, encode
from shardwright.errors import CheckpointError, CorruptCheckpointError, LaunchError, PeerLostError

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.text(), st.integers())
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


def same(one, other):
    """Equal, of the same classes all the way down, with the same order of keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and all(same(one[key], other[key]) for key in one)
    return one == other


@given(VALUES)
def test_values_come_back_as_they_were(value):
    assert same(decode(encode(value)), value)


@given(st.binary(max_size=60))
def test_bytes_of_strangers_are_refused(data):
    whole = encode([1, b"x"])
    for written in (data, b"SWv1" + data, whole[: min(len(data), len(whole) - 1)], whole + b"1" + data):
        with pytest.raises(DecodeError):
            decode(written)


@given(VALUES, st.data())
def test_a_changed_byte_never_raises_anything_else(value, data):
    written = bytearray(encode(value))
    written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        decode(bytes(written))


class Colour(StrEnum):
    RED = "red"


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    colour: Colour
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner | None
    path: Path


def test_declared_classes_travel_and_no_others():
    outer = Outer(Inner(Colour.RED, (1, 2)), Path("/a"))
    with pytest.raises(TypeError, match=r"test_codec\.Outer cannot travel between ranks as data"):
        encode(outer)
    declare(Outer)
    declare(type(DEFAULT_PRICES))
    assert decode(encode([outer, DEFAULT_PRICES])) == [outer, DEFAULT_PRICES]


def test_errors_travel_with_what_they_know():
    error = PeerLostError("rank 3 is gone", rank=3)
    error.add_note("look there")
    found = decode(encode(error))
    assert (type(found), str(found), found.rank, found.__notes__) == (
        PeerLostError,
        "rank 3 is gone",
        3,
        ["look there"],
    )
    assert decode(encode(LaunchError("x", exit_code=7))).exit_code == 7
    assert type(decode(encode(CorruptCheckpointError("x")))) is CorruptCheckpointError


def test_an_error_of_the_script_travels_as_the_kind_that_it_is_of():
    """Attributes of its own are not what the kind is made with."""

    class Own(CheckpointError):
        rank = 2

    found = decode(encode(Own("no room")))
    assert (type(found), str(found)) == (CheckpointError, "no room")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_and_arrays_keep_every_bit(dtype, shape):
    tensor = (torch.rand(shape) * 3).to(dtype)
    found = decode(encode(tensor))
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    found.zero_()  # it is the receiver's own


def test_other_things_of_torch_and_numpy():
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    found = decode(encode(parameter))
    assert isinstance(found, torch.nn.Parameter)
    assert not found.requires_grad
    conjugate = torch.complex(torch.ones(2), torch.ones(2)).conj()
    assert torch.equal(decode(encode(conjugate)), conjugate)
    table = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    assert (decode(encode(table)) == table).all()
    assert decode(encode(np.asfortranarray(np.ones((2, 3))))).flags.f_contiguous
    for value in (np.float32(1.5), np.int64(3), np.bool_(True), torch.float16, torch.Size([1, 2])):
        found = decode(encode(value))
        assert (type(found), found) == (type(value), value)
    assert math.isnan(decode(encode(float("nan"))))


@pytest.mark.parametrize(
    "thing",
    [object(), np.array([object()]), torch.ones(2).to_sparse(), lambda: 0, type, Exception("x")],
    ids=lambda thing: type(thing).__name__,
)
def test_what_is_no_data_is_refused_by_the_sender(thing):
    with pytest.raises(TypeError, match="cannot travel between ranks"):
        encode([thing])


def json_with(text, *pieces):
    """What `encode` would write of this JSON."""
    whole = encode([*pieces])
    plain = encode([])
    head = bytearray(plain[:16])
    head[4:12] = len(text).to_bytes(8, "little")
    head[12:16] = len(pieces).to_bytes(4, "little")
    assert whole[:4] == b"SWv1"
    return bytes(head) + b"".join(len(p).to_bytes(8, "little") for p in pieces) + text + b"".join(pieces)


def test_a_pickle_is_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "run",))

    for written in (pickle.dumps(Attack()), json_with(b'{"object": 0}', pickle.dumps(Attack()))):
        with pytest.raises(DecodeError):
            decode(written)
    assert not (tmp_path / "run").exists()
