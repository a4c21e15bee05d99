"""Each operation, with each placement of its tensors, gives what the whole operation gives."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_calls import CASES, Draw, parts_of
from ranks_in_threads import on_ranks
from torch import Tensor

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.call import map_tensors, tensors_of
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, whole, wrap
from shardwright.torch.tensor_parallel.placing import placed
from shardwright.torch.tensor_parallel.spec import spec_of


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), num_ranks=st.sampled_from([2, 3]))
def test_operation_on_parts_is_the_whole_operation(name, seed, num_ranks):
    check(name, seed, num_ranks)


def check(name, seed, num_ranks):
    draw = Draw(seed)
    func, args, kwargs = CASES[name](draw)
    tensors = list(tensors_of(args, kwargs))
    placements = draw.placements(tensors, num_ranks)
    parts = [parts_of(each, to, num_ranks, draw) for each, to in zip(tensors, placements, strict=True)]
    what = (
        f"{func} {[(tuple(t.shape), t.stride(), str(p)) for t, p in zip(tensors, placements, strict=True)]}"
    )

    copies = iter([_copy(each) for each in tensors])
    whole_args = [map_tensors(lambda _: next(copies), value) for value in args]
    whole_kwargs = {key: map_tensors(lambda _: next(copies), value) for key, value in kwargs.items()}
    wanted = func(*whole_args, **whole_kwargs)
    after = list(tensors_of(tuple(whole_args), whole_kwargs))

    def on_rank(group):
        own = []
        for tensor, placement, each in zip(tensors, placements, parts, strict=True):
            part = each[group.rank].clone()
            spec = spec_of(group, placement, part, shape=tensor.shape, strides=tensor.stride())
            is_divided = str(placement) != "whole" or seed % 2
            own.append(wrap(part, spec) if is_divided else part)
        given = iter(own)
        own_args = [map_tensors(lambda _: next(given), value) for value in args]
        own_kwargs = {key: map_tensors(lambda _: next(given), value) for key, value in kwargs.items()}
        for key, value in kwargs.items():
            if isinstance(value, torch.Generator):
                own_kwargs[key] = torch.Generator().manual_seed(value.initial_seed())
        found = func(*own_args, **own_kwargs)
        # Gather on all ranks, in order.
        return _gathered(found), [whole(each) for each in own]

    strides = [_strides_of(wanted), _strides_of(_without_data(func, args, kwargs))]
    for found, inputs in on_ranks(num_ranks, on_rank):
        # Kernels of the CPU lay some results out in another way than those without data.
        assert _strides_of(found) in strides or not any(isinstance(each, tuple) for each in _flat(found)), (
            what
        )
        _compare(found, wanted, what)
        for have, want in zip(inputs, after, strict=True):
            _same(have, want, f"{what}: an input afterwards")


def _without_data(func, args, kwargs):
    own_args = [map_tensors(lambda each: each.to("meta"), value) for value in args]
    try:
        return func(
            *own_args, **{key: map_tensors(lambda each: each.to("meta"), v) for key, v in kwargs.items()}
        )
    except (NotImplementedError, RuntimeError):
        return None


def _flat(found):
    return found if isinstance(found, list) else [found]


def _strides_of(found):
    """Of results that are divided tensors: shape, and the strides that say something."""
    kept = []
    for each in found if isinstance(found, list | tuple) and not _is_gathered(found) else [found]:
        if _is_gathered(each):
            _, shape, strides = each
        elif isinstance(each, Tensor):
            shape, strides = tuple(each.shape), each.stride()
        else:
            shape, strides = (), ()
        kept.append([step for size, step in zip(shape, strides, strict=True) if size > 1])
    return kept


def _is_gathered(found):
    return isinstance(found, tuple) and len(found) == 3 and isinstance(found[1], tuple)


def _copy(tensor):
    return torch.empty_like(tensor).copy_(tensor)


def _gathered(found):
    if isinstance(found, list | tuple):
        return [_gathered(each) for each in found]
    if isinstance(found, DividedTensor):
        return whole(found), tuple(found.shape), found.stride()
    return found


def _compare(found, wanted, what):
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), what
        for have, want in zip(found, wanted, strict=True):
            _compare(have, want, what)
    elif isinstance(wanted, Tensor):
        if isinstance(found, tuple):
            found, shape, _ = found
            assert shape == tuple(wanted.shape), what
        _same(found, wanted, what)
    else:
        assert found == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), what


def _same(found, wanted, what):
    assert found.shape == wanted.shape, what
    assert found.dtype == wanted.dtype, what
    torch.testing.assert_close(
        found, wanted, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}\n{m}"
    )


def test_attention_from_own_queries_to_keys_of_another_length():
    """The logarithms of sums lie as the queries do, not as the keys."""
    q, k, v = (torch.randn(1, 1, length, 4, dtype=torch.float64) for length in (2, 3, 3))
    func = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    of_queries, of_keys = Cut.of(2, [(1, 1), (0, 1)]), Cut.even(2, 3, num_ranks=2)
    wanted = func(q, k, v)

    def on_rank(group):
        return [whole(each) for each in func(placed(q, of_queries, group), k, placed(v, of_keys, group))]

    for found in on_ranks(2, on_rank):
        _compare(found, wanted, "attention")


def test_a_split_into_one_piece_again():
    """Bug: the second time, a short way took the list of one tensor for the tensor."""
    x = torch.arange(12.0).view(4, 3)

    def on_rank(group):
        own = placed(x, Cut.even(0, 4, num_ranks=2), group)
        return [whole(piece * 2) for _ in range(2) for piece in own.split([3], dim=1)]

    for found in on_ranks(2, on_rank):
        torch.testing.assert_close(found, [x * 2] * 2)
