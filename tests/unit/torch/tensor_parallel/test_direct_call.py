"""Methods that run in place of operators: each must call just that operator, with the same arguments."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.torch.tensor_parallel.decision import METHODS, direct_call

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
