"""Each operation, with each placement of its tensors, gives what the whole operation gives.

Methods that run in place of operators: each must call just that operator, with the same arguments.

Complex tensors that ranks share: below autograd, kernels do not heed the bit of a conjugate.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_calls import CASES, Draw, parts_of
from ranks_in_threads import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.call import map_tensors, tensors_of
from shardwright.torch.tensor_parallel.decision import METHODS, direct_call
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, whole, wrap
from shardwright.torch.tensor_parallel.placing import placed
from shardwright.torch.tensor_parallel.search.search import find_placements
from shardwright.torch.tensor_parallel.search.unit import Unit
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


ATEN = torch.ops.aten


class Seen(TorchDispatchMode):
    """What reaches the dispatcher."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def example(argument, is_first):
    """A value for an argument of an operator's schema."""
    kind = str(argument.type)
    if kind == "Tensor":
        return torch.ones(2, 2) if is_first else torch.full((2, 2), 0.5)
    if kind == "int":
        return {"dim0": 0, "dim1": 1}.get(argument.name, 1)
    if kind == "number":
        return 0.5
    assert kind in ("List[int]", "Optional[List[int]]"), f"no example for {argument.name}: {kind}"
    return {"size": [2, 2], "dims": [1, 0], "dim": [0]}[argument.name]


def arguments(func):
    """Examples for all positional arguments that have no default, and the first that has one."""
    needed, found = list(func._schema.arguments), []
    for argument in needed:
        if argument.kwarg_only or (argument.has_default_value() and found and argument.name != "keepdim"):
            break
        value = True if argument.name == "keepdim" else example(argument, not found)
        found.append(value)
    if func is ATEN.masked_fill.Scalar:
        found[1] = found[1] > 1
    if func is ATEN.bmm.default:
        found = [each.view(1, 2, 2) for each in found]
    return found


@pytest.mark.parametrize("func", METHODS, ids=str)
def test_a_method_calls_its_operator_alone_with_the_same_arguments(func):
    given = arguments(func)
    wanted = func(*[each.clone() if isinstance(each, torch.Tensor) else each for each in given])
    with Seen() as seen:
        result = METHODS[func](*given)
    ((called, args, kwargs),) = seen.calls
    # The one exception is what a view is called where nobody asks whether it is one.
    assert called is (ATEN.view.default if func is ATEN._unsafe_view.default else func)
    assert not kwargs
    assert len(args) == len(given)
    for mine, theirs in zip(given, args, strict=True):
        assert mine is theirs if isinstance(mine, torch.Tensor) else mine == theirs
    torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    assert result.stride() == wanted.stride()


def test_methods_are_compiled_ones():
    """One in Python might do anything before it calls an operator."""
    assert all(type(method).__name__ == "method_descriptor" for method in METHODS.values())


def test_other_operators_are_called_without_the_method_around_them():
    silu = ATEN.silu.default
    x = torch.randn(3)
    assert direct_call(silu) is not silu
    torch.testing.assert_close(direct_call(silu)(x), silu(x), rtol=0, atol=0)


CUT = Cut.even(0, 4, num_ranks=2)
CALLS = {
    "product": lambda x, y: x * y.conj(),
    "quotient": lambda x, y: x.conj() / y,
    "sum": lambda x, y: (x * y).conj().sum(0) * y[0],
    "of a pending sum": lambda x, y: (x.t() @ y).conj() * y[:3],
    "a view of it": lambda x, y: x.conj().unsqueeze(-1) * y.unsqueeze(-1),
    "its parts": lambda x, y: x.conj().imag * 2 + y.real,
    "an imaginary part as it is": lambda x, y: torch._neg_view(x.imag) * y.real,
}


def numbers():
    torch.manual_seed(0)
    return torch.randn(2, 4, 3, dtype=torch.complex128).unbind()


@pytest.mark.parametrize("name", CALLS)
def test_conjugates(name):
    x, y = numbers()
    wanted = CALLS[name](x, y)
    for found in on_ranks(2, lambda group: whole(CALLS[name](placed(x, CUT, group), placed(y, CUT, group)))):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("call", [torch.mul, torch.div])
def test_gradients(call):
    """Products with conjugates: those of a state-space model over two ranks were silently wrong."""

    def gradients(x, y):
        leaves = [each.detach().requires_grad_() for each in (x, y)]
        call(*leaves).abs().square().sum().backward()
        return [whole(each.grad) for each in leaves]

    x, y = numbers()
    wanted = gradients(x, y)
    for found in on_ranks(2, lambda group: gradients(placed(x, CUT, group), placed(y, CUT, group))):
        torch.testing.assert_close(found, wanted)


def test_a_conjugate_follows_what_it_is_a_view_of():
    x, _ = numbers()

    def on_rank(group):
        own = placed(x.clone(), CUT, group)
        view = own.conj()
        own.mul_(2)
        before = whole(view * 1)
        view.add_(1j)
        return before, whole(own)

    for before, after in on_ranks(2, on_rank):
        torch.testing.assert_close(before, (2 * x).conj().resolve_conj())
        torch.testing.assert_close(after, 2 * x - 1j)


class Polar(nn.Module):
    """Multiplies with an imaginary number, whose conjugate its backward asks for."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))

    def forward(self, x):
        z = x @ self.weight
        return z.abs() * torch.exp(1j * z.angle())


def test_an_imaginary_number_is_no_tensor():
    """Bug: no plan for a complex network, whose rule was asked for the conjugate of a number."""
    unit = Unit(Polar(), (torch.zeros(4, 8, dtype=torch.complex128, requires_grad=True),))
    assert find_placements(unit, num_ranks=2).placements.keys() == {"weight"}
