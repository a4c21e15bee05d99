"""Complex tensors that ranks share: below autograd, kernels do not heed the bit of a conjugate."""

import pytest
import torch
from ranks_in_threads import on_ranks
from torch import nn

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divided_tensor import whole
from shardwright.torch.tensor_parallel.placing import placed
from shardwright.torch.tensor_parallel.search import Unit, find_placements

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
