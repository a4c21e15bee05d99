"""What is said of a batch before its tensors: plain batches as data, own containers under the run's "
"secret."""

import pickle
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.comm.joining.run_secret import ForgedError, Seal
from shardwright.errors import LaunchError, UsageError
from shardwright.torch.batch.batch_broadcast import _describe, outline, read_header, written_header
from shardwright.torch.pytorch.tree import flatten

SEAL = Seal(b"key")
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    image: torch.Tensor
    label: object = None

    def __post_init__(self):
        self.seen = "computed"


class Encoding(UserDict):
    pass


def sent(batch, own, seal):
    """The batch as the receiver rebuilds it, with the leaves of the first rank."""
    items, structure = flatten(batch)
    data = written_header([_describe(item) for item in items], structure, seal)
    leaves, found = read_header(data, flatten(own)[1], seal)
    for leaf, item in zip(leaves, items, strict=True):
        assert isinstance(item, np.ndarray) or leaf == _describe(item)
    return data, found.rebuild(items)


def test_a_class_that_a_function_defines():
    """Bug: pickle cannot find it, and said so."""
    Point = namedtuple("Point", ["x", "y"])
    Point.__qualname__ = "test.<locals>.Point"
    _, found = sent(Point(torch.ones(2), 1), Point(torch.zeros(2), 0), SEAL)
    assert found._fields == ("x", "y")
    with pytest.raises(UsageError, match="define the class in a module"):
        sent(Point(torch.ones(2), 1), (torch.zeros(2), 0), SEAL)


PLAIN = {
    "args": ((torch.ones(2, 3), 3, 1.5, None), [True, "text", b"bytes", 2j, slice(1, 2)]),
    3: {"mask": torch.zeros(2, dtype=torch.bool), (1, 2): {"a"}},
    "dtype": (torch.float16, torch.device("cpu"), np.float32(2.0), np.arange(3)),
}


@pytest.mark.parametrize("seal", [None, SEAL])
def test_plain_batches_are_data(seal):
    """Dtypes went as pickles for a while: nobody had noticed, as they had the code of the run's secret."""
    data, found = sent(PLAIN, (), seal)
    assert b'"object"' not in data
    assert repr(found) == repr(PLAIN)


OWN = [
    Pair(torch.ones(1), 2),
    Sample(torch.ones(1), 3),
    Encoding(a=torch.ones(1)),
    OrderedDict(a=1),
    {"x": [Sample(1)]},
]


@pytest.mark.parametrize("batch", OWN, ids=lambda batch: type(batch).__name__)
def test_own_containers_come_from_the_first_rank_under_a_secret(batch):
    _, found = sent(batch, (), SEAL)
    assert type(found) is type(batch)
    assert repr(found) == repr(batch)


def test_values_that_only_pickle_can_carry_need_a_secret():
    batch = [np.array([object(), "x"], dtype=object)]
    items, structure = flatten(batch)
    assert sent([np.array(["x", 3], dtype=object)], (), SEAL)[1][0].tolist() == ["x", 3]
    with pytest.raises(UsageError, match=r"numpy\.ndarray can travel between ranks by pickle alone"):
        written_header([_describe(item) for item in items], structure, None)


def test_a_header_of_strangers_is_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "run",))

    own = flatten(())[1]
    items, structure = flatten([np.array([Attack()], dtype=object)])
    sealed = written_header([_describe(item) for item in items], structure, Seal(b"of another run"))
    for forged in (pickle.dumps(Attack()), b"", sealed, sealed[32:]):
        with pytest.raises(ForgedError):
            read_header(forged, own, SEAL)
        with pytest.raises((LaunchError, UsageError)):
            read_header(forged, own, None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ([torch.ones(2), 3], [torch.zeros(2), 3], True),
        ({"a": "x", "b": None}, {"a": "x", "b": None}, True),
        ([1], [True], False),
        ({1: 2}, {True: 2}, False),
        ([torch.ones(2)], (torch.ones(2),), False),
        ([torch.ones(2)], [torch.ones(2, requires_grad=True)], False),
        ([torch.ones(2)], [torch.ones(2, dtype=torch.float64)], False),
        ([0.0], [0.0], None),
        ([np.arange(2)], [np.arange(2)], None),
        ([OrderedDict(a=1)], [OrderedDict(a=1)], None),
    ],
)
def test_outlines_are_equal_where_headers_are(one, other, alike):
    described = [([_describe(item) for item in flatten(each)[0]], flatten(each)[1]) for each in (one, other)]
    first, second = (outline(*each) for each in described)
    if alike is None:
        assert first is None
        return
    assert (first == second) is alike
    assert (written_header(*described[0], None) == written_header(*described[1], None)) is alike
