"""A wrong rule is found at its first operation, with its placements and the line of the script."""

import pytest
import torch
import torch.nn.functional as F
from ranks_in_threads import on_ranks

from shardwright.errors import VerificationError
from shardwright.placement import PARTIAL_SUM, Cut
from shardwright.torch.tensor_parallel import rules
from shardwright.torch.tensor_parallel.divided_tensor import divided, placement_of, whole
from shardwright.torch.tensor_parallel.form import Form
from shardwright.torch.tensor_parallel.rules.registry import RULES
from shardwright.torch.tensor_parallel.verification import verified


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


@pytest.fixture
def wrong_rule(monkeypatch):
    def put(name, rule):
        monkeypatch.setitem(RULES, name, rule)
        rules.rule_of.cache_clear()

    yield put
    rules.rule_of.cache_clear()


def script(x):
    y = torch.cumsum(x * 2, 0)
    z = F.gelu(y)
    return z.sum()


def test_right_rules_pass():
    def on_rank(group):
        for placement in (Cut.even(0, 4, num_ranks=2), Cut.even(1, 6, num_ranks=2), PARTIAL_SUM):
            x = divided(numbers(4, 6), placement, group).requires_grad_()
            with verified(group):
                script(x).backward()
                torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator().manual_seed(3))
                checks = group.verification.num_checked
                traffic = dict(group.traffic.calls)
            assert checks >= 3
            assert sum(traffic.values()) < 12, "the checks themselves are not counted"
            assert group.verification is None

    on_ranks(2, on_rank)


def test_wrong_rule_of_a_forward(wrong_rule):
    # Running sums along a cut dimension, as if each rank's part were all.
    wrong_rule("cumsum", lambda call: Form(((0, 1),), ((0, 1),)))

    def on_rank(group):
        x = divided(numbers(4, 6), Cut.even(0, 4, num_ranks=2), group)
        silently_wrong = whole(torch.cumsum(x * 2, 0))
        assert not torch.allclose(silently_wrong, torch.cumsum(numbers(4, 6) * 2, 0))
        with pytest.raises(VerificationError) as raised, verified(group):
            script(x)
        return str(raised.value)

    for message in on_ranks(2, on_rank):
        assert message.startswith("aten.cumsum.default differs from the whole operation on rank ")
        assert "(4, 6) cut 0 (r0:2 r1:2)" in message
        assert "dim=0" in message
        assert "test_verification.py:" in message
        assert "a difference of " in message


def test_wrong_rule_of_a_backward(wrong_rule):
    wrong_rule("gelu_backward", lambda call: Form(((0, 1), (0, 1)), ((0, 1),), terms=((0,), (1,))))

    def on_rank(group):
        x = divided(numbers(4, 6), PARTIAL_SUM, group).requires_grad_()
        columns, rows = divided(numbers(4, 40), Cut.even(1, 40, num_ranks=2), group), numbers(40, 6)
        pending = columns @ rows
        assert placement_of(pending) == PARTIAL_SUM
        with verified(group):
            y = F.gelu(x)
            with pytest.raises(VerificationError) as raised:
                y.backward(pending)
        return str(raised.value)

    for message in on_ranks(2, on_rank):
        assert message.startswith("aten.gelu_backward.default differs")
        assert "partial sum" in message
        assert "test_verification.py" in message
        assert "(in its backward)" in message


def test_ranks_with_different_numbers():
    def on_rank(group):
        w = divided(numbers(6, 6), Cut.even(1, 6, num_ranks=2), group)
        with (
            pytest.raises(VerificationError, match="different numbers in tensors that should be whole"),
            verified(group),
        ):
            (numbers(6, 6) + group.rank) @ w

    on_ranks(2, on_rank)
