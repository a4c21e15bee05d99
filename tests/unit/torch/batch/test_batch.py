"""A batch is cut into microbatches.

What is said of a batch before its tensors: plain batches as data, own containers under the run's "
"secret.
"""

import pickle
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.comm.joining.run_secret import ForgedError, Seal
from shardwright.errors import LaunchError, UsageError
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.batch_broadcast import _describe, outline, read_header, written_header
from shardwright.torch.batch.splitter import Splitter
from shardwright.torch.batch.step_output import StepOutput, gather_outputs
from shardwright.torch.pytorch.tree import flatten


def split(splitter, arguments, num_microbatches):
    return [part.arguments for part in Batch(arguments, splitter).split(num_microbatches)]


@given(st.integers(1, 12), st.integers(1, 12))
def test_microbatches_put_together_are_the_batch(batch, microbatches):
    if microbatches > batch:
        return
    x = torch.arange(batch * 2).reshape(batch, 2)
    parts = split(Splitter(names=("x",)), ((x,), {"y": {"z": [x]}}), microbatches)
    assert torch.equal(torch.cat([args[0] for args, _ in parts]), x)
    assert torch.equal(torch.cat([kwargs["y"]["z"][0] for _, kwargs in parts]), x)
    sizes = [len(args[0]) for args, _ in parts]
    assert max(sizes) - min(sizes) <= 1


def test_parts_of_objects_that_slice_themselves_have_leaves():
    class Sliced:
        def smp_slice(self, num_microbatches, microbatch, axis):
            return {"rows": torch.ones(2), "number": microbatch}

    batch = Batch(((torch.ones(4), Sliced()), {}), Splitter())
    for number, part in enumerate(batch.split(2)):
        items, structure = flatten(part.arguments)
        assert [type(leaf) for leaf in part.leaves] == [type(item) for item in items]
        assert part.leaves[-1] == number
        assert part.structure.key == structure.key


def test_rows_that_do_not_match_are_named():
    with pytest.raises(UsageError, match=r"weights has 7 rows along axis 0 .* x has 4"):
        split(Splitter(names=("x", "weights")), ((torch.ones(4), torch.ones(7)), {}), 2)


def test_leaves_are_those_of_before_the_step_function():
    """It may take things out of the containers that it gets, and its copies must find their way back."""
    labels = torch.zeros(4)
    batch = Batch((({"x": torch.ones(4), "labels": labels},), {}))
    own = batch.copied()
    own.arguments[0][0].pop("labels").add_(1)
    batch.take_changes(own)
    assert torch.equal(labels, torch.ones(4))


def test_outputs_by_microbatch():
    results = [{"loss": torch.tensor(float(i)), "n": i, "none": None} for i in range(3)]
    gathered = gather_outputs(results)
    assert isinstance(gathered["loss"], StepOutput)
    assert gathered["loss"].reduce_mean() == 1.0
    assert gathered["loss"].reduce_sum() == 3.0
    assert gathered["loss"].concat().tolist() == [0.0, 1.0, 2.0]
    assert gathered["n"] == [0, 1, 2]
    assert gathered["none"] is None


def test_uneven_outputs_can_be_put_in_a_row_but_not_averaged():
    output = StepOutput([torch.ones(2, 3), torch.ones(1, 3)])
    assert output.concat().shape == (3, 3)
    with pytest.raises(UsageError, match="different shapes"):
        output.reduce_mean()


def test_a_step_output_that_is_taken_for_a_tensor_says_what_to_do():
    output = StepOutput([torch.tensor(1.0), torch.tensor(2.0)])
    for misuse in (lambda: output.item(), lambda: output.backward()):
        with pytest.raises(AttributeError, match=r"no attribute (item|backward).*reduce_mean\(\) for a loss"):
            misuse()
    for misuse in (lambda: f"{output:.3f}", lambda: float(output)):
        with pytest.raises(UsageError, match=r"reduce_mean\(\) for a loss"):
            misuse()
    assert f"{output}" == "StepOutput(2 microbatches of (); reduce_mean() makes one tensor of them)"
    assert not hasattr(output, "shape")


@pytest.mark.parametrize(
    "use",
    [
        lambda output: 0.0 + output,
        lambda output: output / 2,
        lambda output: output < 3,
        lambda output: torch.zeros(()) + output,
        torch.mean,
        torch.isnan,
    ],
)
def test_a_step_output_that_is_taken_for_a_number_says_what_to_do(use):
    with pytest.raises(RuntimeError, match=r"Make one of them first: reduce_mean\(\) for a loss"):
        use(StepOutput([torch.tensor(1.0), torch.tensor(2.0)]))


def test_a_list_with_an_item_for_each_sample_is_cut():
    """Every microbatch had the targets of the first samples."""
    x, targets = torch.arange(5), [{"boxes": torch.ones(number, 4)} for number in range(5)]
    splitter = Splitter(names=("x", "targets", "texts"), lists=frozenset({"targets", "texts"}))
    parts = split(splitter, ((x, targets, list("abcde")), {}), 2)
    assert [[len(target["boxes"]) for target in args[1]] for args, _ in parts] == [[0, 1, 2], [3, 4]]
    assert [args[2] for args, _ in parts] == [["a", "b", "c"], ["d", "e"]]


@pytest.mark.parametrize("targets", [[1, 2, 3], {"a": 1}])
def test_a_list_without_an_item_for_each_sample_is_refused(targets):
    with pytest.raises(UsageError, match="an item for each of the 4 samples of x, and is"):
        split(Splitter(names=("x", "t"), lists=frozenset({"t"})), ((torch.ones(4), targets), {}), 2)


def test_a_list_that_may_belong_to_samples_is_pointed_out(caplog):
    texts = Splitter(names=("x", "captions", "views"), non_split=frozenset({"kept"}))
    batch = ((torch.ones(2), ["a", "b"], [torch.ones(2)] * 2), {"kept": ["a", "b"], "more": ["a"] * 3})
    for _ in range(2):
        assert split(texts, batch, 2)[1][0][1] == ["a", "b"]
    (record,) = caplog.records
    assert "captions is a list of 2 items" in record.getMessage()
    assert 'split_lists=["captions"]' in record.getMessage()


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
