"""What Python reads of a batch is followed without Python.

Which operations behind a unit may compute on the parts that ranks have of its result.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.runtime.traced import Change
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.tracing.divided_tail import divided_tails
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.tracing.trace_data import Step, Trace
from shardwright.torch.tracing.traced_call import view_of


class Model(nn.Module):
    """One layer; `limit` is a buffer of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("limit", torch.tensor(3.0))


def traced(function, *args: Tensor, model: nn.Module | None = None) -> Trace:
    model = model or Model()
    unit_map = UnitMap.of(model, ["layer"])
    intercept_calls(model.layer)

    def step(*args):
        return model.layer(function(model, *args))

    return trace_step(unit_map, step, (args, {}))


def takes(trace: Trace, *args: Tensor) -> bool:
    assert trace.path is not None
    assert trace.path.calls
    return trace.path.taken_by(leaves((args, {})))


def reads_nothing(trace: Trace) -> bool:
    return trace.path is not None and not trace.path.calls


ONES, ZEROS, MIXED = torch.ones(2, 4), torch.zeros(2, 4), torch.tensor([[1.0] * 4, [0.0] * 4])


def test_every_microbatch_takes_the_path_of_a_step_that_reads_nothing():
    trace = traced(lambda model, x: x * 2, ONES)
    assert reads_nothing(trace)
    assert trace.path.taken_by([ZEROS])


def test_what_follows_from_shapes_alone_is_not_read_again():
    trace = traced(lambda model, x: x + 1 if torch.arange(x.shape[1]).sum() > 3 else x, ONES)
    assert reads_nothing(trace)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: (x > 0).all(),
        lambda x: 1.0 in x[:, [-1, 0]].prod(0),
        lambda x: x.sum().item() == 8,
        lambda x: x.tolist() == [[1.0] * 4] * 2,
        lambda x: torch.equal(x, torch.ones(2, 4)),
        lambda x: int(x.sum()) == 8,
        lambda x: len(x[x > 0]) == 8,
        lambda x: x.nonzero().shape[0] == 8,
    ],
)
def test_a_microbatch_of_the_same_outcome_takes_the_path(read):
    trace = traced(lambda model, x: x + 1 if read(x) else x, ONES)
    assert takes(trace, ONES.clone())
    assert not takes(trace, ZEROS)
    assert not takes(trace, MIXED)


def test_other_values_of_the_same_outcome_take_the_path():
    trace = traced(lambda model, x: x + 1 if 3 in x else x, ZEROS)
    assert takes(trace, ONES)
    assert not takes(trace, ONES * 3)


def test_changes_in_place_are_followed_and_the_batch_stays():
    def function(model, x):
        view = x[0]
        view.mul_(0)  # through another tensor than the one that is read
        return x + 1 if x.any() else x

    trace = traced(function, ONES)
    first, second = ONES.clone(), torch.cat([ONES[:1], ZEROS[:1]])
    assert takes(trace, first)
    assert not takes(trace, second)
    assert torch.equal(first, ONES)


def test_buffers_are_those_of_the_model_when_the_microbatch_comes():
    model = Model()
    trace = traced(lambda model, x: x + 1 if (x > model.limit).any() else x, ONES, model=model)
    assert takes(trace, 2 * ONES)
    model.limit = torch.tensor(1.5)
    assert not takes(trace, 2 * ONES)


def test_a_buffer_that_the_path_changes_is_not_changed_by_following_it():
    def function(model, x):
        model.limit.sub_(x.sum())
        return x + 1 if model.limit < 0 else x

    model = Model()
    trace = traced(function, ONES, model=model)
    assert model.limit == 3
    assert takes(trace, 2 * ONES)
    assert not takes(trace, ZEROS)
    assert model.limit == 3


@pytest.mark.parametrize(
    "read",
    [
        lambda x: torch.rand(()) + x.sum() > 0,  # other random numbers come next time
        lambda x: x.sum() > 0 and torch.rand(()) < 2,
        lambda x: nn.functional.dropout(x, 0.5).sum() >= 0,
        lambda x: x.numpy().sum() > 0,  # NumPy may change its memory unseen
        lambda x: x.new_zeros(9)[: x.sum().long()].numel() == 8,  # a tensor inside a slice
        lambda x: torch.from_numpy(x.numpy()).sum() > 0,
    ],
)
def test_what_cannot_be_followed_is_traced_again(read):
    trace = traced(lambda model, x: x + 1 if read(x) else x, ONES)
    assert trace.path is None


def test_autocast_is_the_same_as_in_the_trace():
    def function(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return x if (x @ x.T).max() > 263.5 else x + 1

    x = torch.full((2, 4), 8.11)  # 263.1, in bfloat16 264
    trace = traced(function, x)
    assert takes(trace, x.clone())


def test_several_reads_must_all_agree():
    def function(model, x):
        if (x > 0).all():
            return x
        return x + 1 if x[0].sum() > 2 else x + 2

    trace = traced(function, MIXED)
    assert takes(trace, MIXED * 2)
    assert not takes(trace, ONES)
    assert not takes(trace, ZEROS)


def step(*, reads=(), changes=()):
    return Step(func=None, node=0, reads=reads, changes=changes)


def change(position, before, after, tensor):
    return Change(position, before, after, view_of(tensor))


WORDS = 6


def tails(step):
    """Of each unit that has a tail: its operations, and how many of its results the step function gets."""
    sizes = {"body": (4, 4), "head": (4, WORDS), "after": (WORDS, 4)}
    model = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    unit_map = UnitMap.of(model, list(model))
    for module in unit_map.modules.values():
        intercept_calls(module)
    x, target = torch.ones(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    trace = trace_step(unit_map, lambda x, target: step(model, x, target), ((x, target), {}))
    names = [node.name for node in trace.graph.nodes]
    return {
        names[node]: ([names[each] for each in tail.nodes], len(tail.returned))
        for node, tail in divided_tails(trace).items()
    }


def loss_of(logits, target):
    return F.cross_entropy(logits.reshape(-1, WORDS), target.reshape(-1))


def in_16_bits(model, x, target):
    loss = loss_of(model["head"](model["body"](x)).bfloat16()[:, 1:].contiguous(), target[:, 1:])
    loss.backward()


def returned(model, x, target):
    logits = model["head"](model["body"](x))
    loss = loss_of(logits, target)
    loss.backward()
    return loss, logits


def test_operations_up_to_the_loss():
    chain = ["bfloat16", "__getitem__", "contiguous", "reshape", "cross_entropy"]
    assert tails(in_16_bits) == {"head": (chain, 0)}
    assert tails(returned) == {"head": (["reshape", "cross_entropy"], 1)}


def another_reader(model, x, target):
    logits = model["head"](model["body"](x)).view(-1, WORDS)
    (F.cross_entropy(logits, target.view(-1)) + logits.logsumexp(-1).mean()).backward()


def another_unit(model, x, target):
    logits = model["head"](model["body"](x))
    (loss_of(logits, target) + model["after"](logits).sum()).backward()


def changed_in_place(model, x, target):
    logits = model["head"](model["body"](x))
    logits[..., 0] = 0
    loss_of(logits, target).backward()


def no_loss(model, x, target):
    model["head"](model["body"](x)).double().sum().backward()


def read_behind_the_backward(model, x, target):
    logits = model["head"](model["body"](x))
    loss = loss_of(logits, target)
    loss.backward()
    return logits.view(-1)


def called_twice(model, x, target):
    head = model["head"]
    (loss_of(head(model["body"](x)), target) + loss_of(head(x), target)).backward()


def with_gradients_of_others(model, x, target):
    scale = model["body"](x)[..., :1]
    loss_of(model["head"](x) * scale, target).backward()


@pytest.mark.parametrize(
    "step",
    [
        another_reader,
        another_unit,
        changed_in_place,
        no_loss,
        read_behind_the_backward,
        called_twice,
        with_gradients_of_others,
    ],
)
def test_whole_where_anything_else_reads(step):
    assert "head" not in tails(step)
