"""A softmax over words that ranks share, where its sums are at their limits."""

import pytest
import torch
import torch.nn.functional as F
from ranks_in_threads import on_ranks

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divided_tensor import divided, whole

WORDS, ROWS = 2_000, 100


def masked_on_a_rank(logits):
    """One rank has no word that may come; the other one goes by the kernel of PyTorch."""
    logits[:, WORDS // 2 :] = -float("inf")


def masked_everywhere(logits):
    logits[3] = -float("inf")


def far_apart(logits):
    logits[:, 7] = 1e9
    logits[::2, -1] = -1e9


@pytest.mark.parametrize("change", [masked_on_a_rank, masked_everywhere, far_apart])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_at_their_limits(change, dtype):
    torch.manual_seed(0)
    logits = torch.randn(ROWS, WORDS, dtype=dtype)
    change(logits)
    target = torch.randint(0, WORDS // 2, (ROWS,))
    one = logits.clone().requires_grad_()
    wanted = F.cross_entropy(one, target, reduction="none")
    wanted[torch.isfinite(wanted)].sum().backward()
    cut = Cut.even(1, WORDS, num_ranks=2)

    def on_rank(group):
        part = divided(logits, cut, group).requires_grad_()
        found = F.cross_entropy(part, target, reduction="none")
        torch.where(torch.isfinite(wanted), found, 0.0).sum().backward()
        return whole(found), whole(F.log_softmax(part, 1)), whole(part.grad)

    for found, scores, gradient in on_ranks(2, on_rank):
        limits = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(found, wanted.detach(), equal_nan=True, **limits)
        torch.testing.assert_close(scores, F.log_softmax(logits, 1), equal_nan=True, **limits)
        finite = torch.isfinite(wanted)
        torch.testing.assert_close(gradient[finite], one.grad[finite], equal_nan=True, **limits)
