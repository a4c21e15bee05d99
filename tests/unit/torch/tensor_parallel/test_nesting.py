"""Parts of a tensor that other ranks share in turn: each operation gives what the whole one gives."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_calls import CASES, Draw, parts_of
from ranks_in_threads import on_grid
from test_rules import _compare, _copy, _gathered, _same
from torch import Tensor

from shardwright.placement import BetweenUnits, Cut, Placement, Whole
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tensor_parallel.call import map_tensors, tensors_of
from shardwright.torch.tensor_parallel.divided_tensor import is_nested, whole, wrap
from shardwright.torch.tensor_parallel.group import Traffic
from shardwright.torch.tensor_parallel.placing import at_hand, placed
from shardwright.torch.tensor_parallel.redistribution import replaced
from shardwright.torch.tensor_parallel.spec import spec_of

OUTER = INNER = 2


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_operation_on_parts_of_parts_is_the_whole_operation(name, seed):
    check(name, seed)


def test_running_statistics_that_an_inner_group_cuts_are_put_together_alike():
    """Ranks of the outer group took other parts of them, which the inner group had placed in other ways."""
    check("batch_norm", 894420468)


class Parts:
    """What each rank of the grid has of a tensor."""

    def __init__(self, tensor: Tensor, outer: Placement, draw: Draw):
        self.tensor, self.outer = tensor, outer
        self.parts = parts_of(tensor, outer, OUTER, draw)
        inside = draw.placement(self.parts[0], INNER)
        self.inside = [inside] * OUTER
        if isinstance(inside, Cut) and len({part.shape[inside.dim] for part in self.parts}) > 1:
            lengths = [part.shape[inside.dim] for part in self.parts]
            self.inside = [Cut.even(inside.dim, length, num_ranks=INNER) for length in lengths]
        self.own = [
            parts_of(part, each, INNER, draw) for part, each in zip(self.parts, self.inside, strict=True)
        ]

    def on(self, group):
        place, inner = group.rank, group.inner
        part, inside = self.parts[place], self.inside[place]
        own = self.own[place][inner.rank].clone()
        if not isinstance(inside, Whole):
            own = wrap(own, spec_of(inner, inside, own, shape=part.shape, strides=part.stride()))
        if isinstance(self.outer, Whole):
            return own
        spec = spec_of(group, self.outer, own, shape=self.tensor.shape, strides=self.tensor.stride())
        return wrap(own, spec)

    def __str__(self) -> str:
        return f"{tuple(self.tensor.shape)} {self.tensor.stride()} {self.outer}, {self.inside[0]}"


def check(name, seed):
    draw = Draw(seed)
    func, args, kwargs = CASES[name](draw)
    tensors = list(tensors_of(args, kwargs))
    placements = draw.placements(tensors, OUTER)
    parts = [Parts(each, to, draw) for each, to in zip(tensors, placements, strict=True)]
    what = f"{func} {[str(each) for each in parts]}"
    copies = iter([_copy(each) for each in tensors])
    whole_args = [map_tensors(lambda _: next(copies), value) for value in args]
    whole_kwargs = {key: map_tensors(lambda _: next(copies), value) for key, value in kwargs.items()}
    wanted = func(*whole_args, **whole_kwargs)
    after = list(tensors_of(tuple(whole_args), whole_kwargs))

    def on_rank(group):
        own = [each.on(group) for each in parts]
        given = iter(own)
        own_args = [map_tensors(lambda _: next(given), value) for value in args]
        own_kwargs = {key: map_tensors(lambda _: next(given), value) for key, value in kwargs.items()}
        for key, value in kwargs.items():
            if isinstance(value, torch.Generator):
                own_kwargs[key] = torch.Generator().manual_seed(value.initial_seed())
        found = func(*own_args, **own_kwargs)
        return _gathered(found), [whole(each) for each in own]

    for found, inputs in on_grid(OUTER, INNER, on_rank):
        _compare(found, wanted, what)
        for have, want in zip(inputs, after, strict=True):
            _same(have, want, f"{what}: an input afterwards")


def test_heads_that_ranks_share_are_exchanged_for_positions_without_a_gather():
    """Each rank exchanges its own heads alone, with the ranks that have the same place in their groups."""
    heads, positions = Cut.even(1, 4, num_ranks=INNER), Cut.even(2, 6, num_ranks=OUTER)
    target = Cut.in_segments(1, [2, 2], num_ranks=OUTER)
    data = torch.arange(2 * 4 * 6 * 3.0).view(2, 4, 6, 3)

    def on_rank(group):
        tensor = placed(data, positions, group)
        part = placed(tensor._local, heads, group.inner)
        given = {"shape": data.shape, "strides": data.stride()}
        moved = replaced(group, part, source=positions, target=target, **given)
        spec = spec_of(group, target, moved, **given)
        assert moved._spec.placement == Cut.even(1, 2, num_ranks=INNER)
        back = replaced(group, moved, source=target, target=positions, **given)
        assert back._spec.placement == heads
        traffic = group.traffic.sent_bytes.total(), group.inner.traffic.calls.total()
        return traffic, is_nested(wrap(moved, spec)), whole(wrap(moved, spec)), whole(back), whole(part)

    for (sent, gathers), nested, found, back, part in on_grid(OUTER, INNER, on_rank):
        # A quarter of the tensor is this rank's; it sends half of that, and again.
        assert sent == data.nbytes // 4
        assert gathers == 0
        assert nested
        torch.testing.assert_close(found, data)
        torch.testing.assert_close(back, part)


@pytest.mark.parametrize("length", [12, 15, 16])
def test_a_shifted_loss_computes_on_parts_of_parts(length):
    """Parts of ``logits[:, :-1]`` are cut in other places on each outer rank; they were gathered whole."""
    between = BetweenUnits.of_batch([(2, length)], 1, num_ranks=OUTER, inner_ranks=INNER, inner_dim=1)
    torch.manual_seed(0)
    logits, ids = torch.randn(2, length, 6, dtype=torch.float64), torch.randint(0, 6, (2, length))

    def gradient(x):
        leaf = x.detach().requires_grad_()
        loss = F.cross_entropy(leaf[:, :-1].reshape(-1, 6), ids[:, 1:].reshape(-1))
        # Another tensor with the same outer cut, whose parts are cut evenly.
        (loss + (leaf.clone() * 2)[:, : length - 1].contiguous().sum()).backward()
        return loss, leaf.grad

    def on_rank(group):
        x = Boundary(group, between).placed(logits.clone())
        for each in (group, group.inner):
            each.traffic = Traffic()
        loss, found = gradient(x)
        return max(sent_bytes(group), sent_bytes(group.inner)), whole(loss), whole(found)

    wanted, of_logits = gradient(logits)
    for sent, loss, found in on_grid(OUTER, INNER, on_rank):
        assert sent <= 64  # sums of losses and of tokens that count
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(found, of_logits)


def sent_bytes(group):
    return group.traffic.sent_bytes.total()


def test_parts_that_ranks_have_cut_in_different_ways_are_gathered_before_they_move():
    """As long on both outer ranks, and cut in different ways: 7 + 8 positions, and 8 + 7."""
    between = BetweenUnits.of_batch([(2, 31)], 1, num_ranks=OUTER, inner_ranks=INNER, inner_dim=1)
    data = torch.randn(2, 31, 4)

    def on_rank(group):
        part = Boundary(group, between).placed(data.clone())[:, :-1].clone()
        return [each.length(0) for each in (part._spec.placement, part._local._spec.placement)], whole(part)

    found = on_grid(OUTER, INNER, on_rank)
    assert [lengths for lengths, _ in found] == [[15, 7]] * 2 + [[15, 8]] * 2
    for _, have in found:
        torch.testing.assert_close(have, data[:, :-1])


def test_what_one_inner_group_has_at_hand_makes_no_decision_of_the_outer_group_new():
    """One rank decided anew, and waited for the others, which did not."""
    between = BetweenUnits.of_batch([(2, 12)], 1, num_ranks=OUTER, inner_ranks=INNER, inner_dim=1)
    data, weight = torch.arange(2.0 * 12 * 4).view(2, 12, 4), torch.arange(16.0).view(4, 4)

    def on_rank(group):
        boundary = Boundary(group, between)
        x = boundary.placed(data.clone())
        own = placed(weight, Cut.even(0, 4, num_ranks=INNER), group.inner)
        group.forget_gathered()
        first = x @ own
        group.forget_gathered()
        if group.rank == 0:
            at_hand(own)
        return whole(first), whole(x @ own)

    for found in on_grid(OUTER, INNER, on_rank):
        for each in found:
            torch.testing.assert_close(each, data @ weight)


@pytest.mark.parametrize("length", [5, 7])
def test_parts_of_one_position_are_not_cut_again(length):
    """Gradients of a mean over positions: ranks with one called another collective."""
    between = BetweenUnits.of_batch([(2, length)], 1, num_ranks=OUTER, inner_ranks=INNER, inner_dim=1)
    data = torch.randn(2, length, 4, dtype=torch.float64)

    def gradient(x):
        leaf = x.detach().requires_grad_()
        y = leaf.transpose(0, 1).contiguous().transpose(0, 1)
        y = y * 2 + y.mean(1, keepdim=True)
        y = y.transpose(0, 1).contiguous().transpose(0, 1)
        (y * y).sum().backward()
        return leaf.grad

    for found in on_grid(OUTER, INNER, lambda g: whole(gradient(Boundary(g, between).placed(data.clone())))):
        torch.testing.assert_close(found, gradient(data))


@pytest.mark.parametrize("length", [11, 12])
def test_what_one_rank_cannot_tell_apart_no_other_rank_can(length):
    """One rank had both tensors placed alike, the other not: it alone made a decision anew, and waited."""
    between = BetweenUnits.of_batch([(2, length)], 1, num_ranks=OUTER, inner_ranks=INNER, inner_dim=1)
    data = torch.arange(2.0 * length * 4).view(2, length, 4)

    def on_rank(group):
        boundary = Boundary(group, between)
        first = boundary.placed(data.clone())[:, :-1].clone()
        second = boundary.all_placed([first], keeps_cuts=True)[0]
        return whole(first * 2), whole(second * 2)

    for found in on_grid(OUTER, INNER, on_rank):
        for each in found:
            torch.testing.assert_close(each, 2 * data[:, :-1])


@pytest.mark.parametrize("length", [3, 11, 12])
@pytest.mark.parametrize("until", [None, -1, 2])
def test_parts_between_units_are_cut_again_on_all_ranks_or_on_none(length, until):
    """Parts of ``logits[:, :-1]`` differ in length, and one rank alone cut its part: others waited for it."""
    between = BetweenUnits.of_batch([(2, length)], 1, num_ranks=OUTER, inner_ranks=INNER, inner_dim=1)
    logits = torch.arange(2.0 * length * 4).view(2, length, 4)

    def on_rank(group):
        boundary = Boundary(group, between)
        part = boundary.placed(logits.clone())[:, :until]
        kept = boundary.all_placed([part], keeps_cuts=True)[0]
        return whole(kept), is_nested(kept), (kept * 2).sum().item()

    found = on_grid(OUTER, INNER, on_rank)
    wanted = logits[:, :until]
    for have, _, total in found:
        torch.testing.assert_close(have, wanted)
        assert total == 2 * wanted.sum()
    assert len({nested for _, nested, _ in found}) == 1
