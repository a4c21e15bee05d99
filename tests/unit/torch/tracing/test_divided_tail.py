"""Which operations behind a unit may compute on the parts that ranks have of its result."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tracing.divided_tail import divided_tails
from shardwright.torch.tracing.trace import trace_step

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
