"""Writes in place, through views and copies of views, and what leaves the usual way of an operation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks_in_threads import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from choices import some_combinations
from shardwright.errors import UsageError
from shardwright.placement import PARTIAL_SUM, WHOLE, BetweenUnits, Cut
from shardwright.torch.tensor_parallel.divided_tensor import divided, placement_of, whole

F64 = torch.float64
PLACEMENTS = {
    "rows": Cut.of(0, [(0, 1), (1, 3)]),
    "columns": Cut.in_segments(1, [2, 4], num_ranks=2),
    "pending": PARTIAL_SUM,
    "whole": WHOLE,
}


def numbers(*shape):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(len(shape)))


def same_as_plain(script, *shape, placement, num_ranks=2):
    """Runs a script on a divided tensor and on a plain one; it returns a list of tensors."""
    data = numbers(*shape)
    wanted = script(data.clone().requires_grad_())

    def on_rank(group):
        found = script(divided(data, placement, group).requires_grad_())
        return [whole(each) for each in found]

    for found in on_ranks(num_ranks, on_rank):
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have, want.detach(), rtol=1e-12, atol=1e-12)


def write_through_true_view(x):
    y = x * 1
    y[1:3].mul_(2)
    y.t()[0].add_(1)
    (y**2).sum().backward()
    return [y, x.grad]


def write_to_base_of_flat_view(x):
    y = x.detach() * 1
    flat, other = y.view(-1), y.view(2, -1)
    y.add_(1)
    first = flat * 1
    other.mul_(2)
    return [first, flat, other, y]


def write_through_select_of_cut_dimension(x):
    y = x * 1
    y[2] = 7
    y[:, 1].zero_()
    y[0, 0] += 1
    return [y, *torch.autograd.grad((y * y).sum(), x)]


def write_to_views_while_others_look(x):
    y = x.detach() * 1
    a, b, c = y.view(-1), y.t().diagonal(), y[1]
    a[0] = 4
    first = [b * 1, c * 1]
    b.zero_()
    second = [a * 1, c * 1]
    c.fill_(3)
    y.relu_()
    return [*first, *second, a, b, c, y]


def copied_rows(x):
    y = torch.zeros_like(x)
    y[1:] = x[:-1] * 2
    y.copy_(y.flip(0))
    return [y, *torch.autograd.grad((y * y).sum(), x)]


def into_plain_memory(x):
    cache = torch.zeros(2, 4, 6, dtype=F64)
    cache[0] = x.detach()
    cache[1].copy_(x.detach() * 2)
    cache[:, 0].add_(x.detach()[0])
    return [cache]


def results_given(x):
    y = x.detach()
    out = torch.empty_like(y)
    torch.mul(y, 3, out=out)
    plain = torch.empty(0, dtype=F64)
    torch.mm(y, y.t(), out=plain)
    return [out, plain]


def data_of_parameter(x):
    x.data.mul_(2)
    first = (x * 1).detach()
    x.data = torch.ones(4, 6, dtype=F64)
    second = (x * 1).detach()
    x.data = x.data * 3
    x.data[0] = 9
    (x * x).sum().backward()
    return [first, second, x, x.grad]


def test_a_sum_is_taken_for_its_aliases_too():
    """As of what `torch.utils.checkpoint` keeps of a repeated forward, which must go on like the first."""

    def on_rank(group):
        group.shares(BetweenUnits(2, 0, frozenset([4])))
        summand = divided(torch.ones(4, 6, dtype=F64), PARTIAL_SUM, group)
        alias, view = summand.detach(), summand.detach().detach()
        first = torch.tanh(summand)
        sent = dict(group.traffic.calls)
        again = torch.tanh(alias) + torch.tanh(view)
        assert dict(group.traffic.calls) == sent
        assert placement_of(alias) == placement_of(summand) != PARTIAL_SUM
        alias.add_(1)
        return [whole(each) for each in (first, again, summand, view)]

    for first, again, *seen in on_ranks(2, on_rank):
        torch.testing.assert_close(again, 2 * first)
        assert all(torch.equal(each, torch.full((4, 6), 2.0, dtype=F64)) for each in seen)


def set_by_masks_and_indices(x):
    y = x * 1
    y[y > 0] = 0.5
    y[torch.tensor([0, 2])] = y[torch.tensor([1, 3])].detach()
    y.index_add_(1, torch.tensor([0, 0, 3]), torch.ones(4, 3, dtype=F64))
    y.masked_fill_(y < -1, 0)
    return [y, *torch.autograd.grad((y * y).sum(), x)]


def accumulated(x):
    for factor in (1.0, 2.0):
        (x * factor).pow(2).sum().backward()
    x.grad.mul_(0.5)
    return [x.grad]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return 2 * x * w.sum(0)

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return 2 * gradient * w.sum(0), (2 * gradient * x).sum(0, keepdim=True).expand_as(w)


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def custom_functions(x):
    y = Added.apply(Doubled.apply(x * 1, x))
    return [y, *torch.autograd.grad((y * y).sum(), x)]


def recomputed(x, reentrant):
    def body(y):
        return torch.tanh(y @ y.t()) @ y

    y = checkpoint(body, x, use_reentrant=reentrant)
    return [y, *torch.autograd.grad((y * y).sum(), x)] if not reentrant else [y]


def recomputed_without_reentry(x):
    return recomputed(x, False)


def recomputed_with_reentry(x):
    y = recomputed(x, True)[0]
    (y * y).sum().backward()
    return [y, x.grad]


def read_by_python(x):
    y = x.detach()
    picked = y[y[:, 0] > 0]
    return [
        torch.tensor(y.tolist()),
        torch.from_numpy(y.numpy().copy()),
        torch.tensor(y.sum().item(), dtype=F64),
        picked,
        torch.tensor(float(y.abs().max())),
        torch.tensor(len(y)),
        y.nonzero(),
        torch.tensor(bool((y > 100).any())),
    ]


def shapes_changed_in_place(x):
    y = x.detach() * 1
    y.transpose_(0, 1)
    y.unsqueeze_(0)
    y[0, 1:3] = 4
    flat = y.flatten()
    return [y * 1, flat, y.squeeze_(0).t_() + 1]


def second_derivative(x):
    y = (torch.sigmoid(x) ** 3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    return [first, *torch.autograd.grad((first**2).sum(), x)]


def hooks(x):
    y = x * 2
    y.register_hook(lambda gradient: gradient * 5)
    (y * y).sum().backward()
    return [x.grad]


SCRIPTS = [
    write_through_true_view,
    write_to_base_of_flat_view,
    write_through_select_of_cut_dimension,
    write_to_views_while_others_look,
    copied_rows,
    into_plain_memory,
    results_given,
    data_of_parameter,
    set_by_masks_and_indices,
    accumulated,
    custom_functions,
    recomputed_without_reentry,
    recomputed_with_reentry,
    read_by_python,
    shapes_changed_in_place,
    second_derivative,
    hooks,
]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script_on_divided_tensor_does_what_it_does_on_a_plain_one(script, placement):
    same_as_plain(script, 4, 6, placement=PLACEMENTS[placement])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Weights(Attention):
    def forward(self, x):
        values, weights = self.attention(x, x, x)
        return values + weights.sum()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = getattr(nn, kind)(8, 6, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.inner(x)[0]


class Cell(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = getattr(nn, kind)(8, 8)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.inner(step, state)
        return state[0] if isinstance(state, tuple) else state


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            nn.RMSNorm(8),
            nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
        )

    def forward(self, x):
        return self.layers(x)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(5, 8, 3, padding=1),
            nn.BatchNorm1d(8),
            nn.GroupNorm(4, 8),
            nn.Conv1d(8, 8, 3, padding=1, groups=4),
            nn.ConvTranspose1d(8, 6, 2),
            nn.InstanceNorm1d(6, affine=True),
            nn.MaxPool1d(2),
            nn.Upsample(scale_factor=2),
            nn.PReLU(6),
        )

    def forward(self, x):
        return self.layers(x)


MODULES = {
    "attention": Attention,
    "attention with weights": Weights,
    "encoder layer": Encoder,
    "lstm": lambda: Recurrent("LSTM"),
    "gru": lambda: Recurrent("GRU"),
    "lstm cell": lambda: Cell("LSTMCell"),
    "norms of weights": Normed,
    "convolutions": Convolutions,
}


def alternating(module, num_ranks):
    found = {}
    for index, (name, parameter) in enumerate(module.named_parameters()):
        dim = index % parameter.dim() if parameter.dim() else 0
        if parameter.dim():
            found[name] = Cut.even(dim, parameter.shape[dim], num_ranks=num_ranks)
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "training"),
    some_combinations(list(MODULES), [torch.float64, torch.float32, torch.bfloat16], [True, False]),
)
def test_module_on_divided_parameters_is_the_plain_module(name, dtype, training):
    from shardwright.torch.tensor_parallel.divide import divide, settle_gradients

    if dtype == torch.bfloat16 and "norms" in name:
        pytest.skip("torch has no orthogonal matrices of 16 bits")
    torch.manual_seed(0)
    module = MODULES[name]().to(dtype).train(training)
    x = numbers(3, 5, 8).to(dtype)
    placements = alternating(module, 2)
    copies = [copy.deepcopy(module) for _ in range(2)]
    wanted = module(x)
    wanted.float().pow(2).sum().backward()
    with torch.no_grad():
        without_graph = module(x)

    def on_rank(group):
        own = copies[group.rank]
        divide(own, placements, group)
        found = own(x)
        found.float().pow(2).sum().backward()
        settle_gradients(own.parameters())
        with torch.no_grad():
            again = own(x)
        return (
            whole(found),
            [whole(each.grad) for each in own.parameters()],
            whole(again),
            dict(own.named_buffers()),
        )

    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    for found, gradients, again, buffers in on_ranks(2, on_rank):
        torch.testing.assert_close(found, wanted.detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(again, without_graph, rtol=tolerance, atol=tolerance)
        for have, parameter in zip(gradients, module.parameters(), strict=True):
            torch.testing.assert_close(have, parameter.grad, rtol=10 * tolerance, atol=10 * tolerance)
        for key, buffer in module.named_buffers():
            torch.testing.assert_close(whole(buffers[key]), buffer, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_autocast(placement):
    w = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))

    def script(weight):
        # Threads share the cache of weights that were cast; ranks do not.
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            y = F.linear(x, weight)
            z = F.softmax(y, -1) @ weight
            assert y.dtype == z.dtype == torch.bfloat16
        z.float().sum().backward()
        return z, weight.grad

    wanted = script(w.clone().requires_grad_())
    for found in on_ranks(
        2,
        lambda group: [
            whole(each) for each in script(divided(w, PLACEMENTS[placement], group).requires_grad_())
        ],
    ):
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have, want.detach(), rtol=5e-2, atol=5e-2)


def test_memory_and_pickles_are_refused():
    def on_rank(group):
        x = divided(numbers(4, 6), Cut.even(0, 4, num_ranks=2), group)
        with pytest.raises(UsageError, match="no memory holds it all"):
            x.data_ptr()
        with pytest.raises(UsageError, match="cannot be pickled"):
            torch.save(x, "/dev/null")
        with pytest.raises(UsageError, match="would resize"):
            torch.mul(x, 2, out=divided(numbers(3, 2), Cut.even(0, 3, num_ranks=2), group))

    on_ranks(2, on_rank)


def test_data_of_a_whole_tensor_may_be_that_of_a_divided_one():
    """Bug: it had no memory, and the next operation ended the process."""

    def on_rank(group):
        own = nn.Parameter(torch.zeros(4, 6, dtype=F64))
        own.data = divided(torch.ones(4, 6, dtype=F64), Cut.even(0, 4, num_ranks=2), group) * 2
        own.data.add_(1)
        return own.detach()

    for found in on_ranks(2, on_rank):
        assert torch.equal(found, torch.full((4, 6), 3.0, dtype=F64))
