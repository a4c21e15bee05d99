"""A batch is cut into microbatches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import UsageError
from shardwright.torch.batch.batch import Batch
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


def test_what_cannot_be_cut_is_described():
    splitter = Splitter(names=("model", "x", "y"))
    batch = Batch(((torch.nn.Linear(1, 1), [[1.0]]), {"y": 2}), splitter)
    assert batch.num_samples is None
    assert batch.described_kinds == " among x (list), y (int)"
    assert Batch(((), {}), splitter).described_kinds == ""


def test_named_arguments_are_not_split():
    table = torch.ones(7, 2)
    splitter = Splitter(names=("x", "table"), non_split=frozenset({"table"}))
    parts = split(splitter, ((torch.ones(4), table), {}), 2)
    assert all(args[1] is table for args, _ in parts)


def test_objects_slice_themselves():
    class Sliced:
        def smp_slice(self, num_microbatches, microbatch, axis):
            return (num_microbatches, microbatch, axis)

    parts = split(Splitter(), ((torch.ones(2), Sliced()), {}), 2)
    assert [args[1] for args, _ in parts] == [(2, 0, 0), (2, 1, 0)]


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


def test_a_batch_smaller_than_the_microbatches():
    with pytest.raises(UsageError, match="the batch has 2 samples, but microbatches is 4"):
        split(Splitter(), ((torch.ones(2),), {}), 4)


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
