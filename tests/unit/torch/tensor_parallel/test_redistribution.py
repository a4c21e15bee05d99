"""Changes of placement: what each rank has then, what it sent, and that it lies in memory as before.

A softmax over words that ranks share, where its sums are at their limits.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from random_calls import Draw, parts_of
from ranks_in_threads import on_ranks

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut
from shardwright.torch.tensor_parallel.divided_tensor import divided, whole
from shardwright.torch.tensor_parallel.redistribution import own_part, replaced
from shardwright.torch.tensor_parallel.spec import dense_strides, in_order, is_dense, put_in_order


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), num_ranks=st.integers(1, 4))
def test_from_each_placement_to_each(seed, num_ranks):
    draw = Draw(seed)
    tensor = draw.tensor(*draw.sizes(draw.size(1, 3), least=0))
    dtype = draw.random.choice([torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    tensor = (tensor * 4).round().to(dtype)
    source, target = (draw.placement(tensor, num_ranks) for _ in range(2))
    parts = parts_of(tensor, source, num_ranks, draw)
    sent = [0] * num_ranks

    def on_rank(group):
        collectives, rank = group.collectives, group.rank
        gather, exchange = collectives.all_gather, collectives.all_to_all

        def counted_gather(output, data):
            sent[rank] += data.numel() * (num_ranks - 1)
            gather(output, data)

        def counted_exchange(output, data, receives, sends):
            sent[rank] += sum(sends) - sends[rank]
            exchange(output, data, receives, sends)

        collectives.all_gather, collectives.all_to_all = counted_gather, counted_exchange
        found = replaced(
            group,
            parts[rank].clone(),
            shape=tensor.shape,
            strides=tensor.stride(),
            source=source,
            target=target,
        )
        reduced = group.traffic.sent_bytes["all_reduce"]
        # What was planned is what was sent, to the byte; an all-reduce is planned as a ring sends it.
        assert sum(group.traffic.sent_bytes.values()) == sent[rank] + reduced
        if reduced:
            size = tensor.numel() * tensor.element_size()
            assert (source, target) == (PARTIAL_SUM, WHOLE)
            assert 0 <= 2 * (num_ranks - 1) * size / num_ranks - reduced < tensor.element_size()
        if tensor.numel() and not isinstance(target, type(PARTIAL_SUM)):
            assert in_order(found, tensor.shape, tensor.stride())
            assert is_dense(found.shape, found.stride())
        if target == PARTIAL_SUM:
            return replaced(
                group, found, shape=tensor.shape, strides=tensor.stride(), source=target, target=WHOLE
            )
        assert torch.equal(found, own_part(tensor, target, rank) if isinstance(target, Cut) else tensor)
        return None

    for total in on_ranks(num_ranks, on_rank):
        assert total is None or torch.equal(total, tensor)


def test_memory_order():
    whole = torch.empty(4, 2, 6).permute(2, 0, 1)
    assert whole.stride() == (1, 12, 6)
    assert dense_strides((3, 4, 2), whole.stride()) == [1, 6, 3]
    assert not in_order(torch.empty(3, 4, 2), whole.shape, whole.stride())
    part = put_in_order(torch.arange(24.0).view(3, 4, 2), whole.stride())
    assert in_order(part, whole.shape, whole.stride())
    assert torch.equal(part, torch.arange(24.0).view(3, 4, 2))
    assert is_dense(part.shape, part.stride())
    assert not is_dense((2, 2), (4, 1))
    # A kernel that counts on a dense last dimension must find one.
    assert not in_order(torch.empty(2, 8)[:, ::2], torch.Size([2, 8]), (8, 1))


def test_the_last_dimension_of_a_gathered_tensor_is_dense():
    """GPTBigCode was silently wrong: its one head of keys, cut along its size, was gathered so that the last
    dimension was not dense. The kernel for attention, chosen by the strides of the whole, read other numbers.
    """

    def on_rank(group):
        key = torch.randn(2, 1, 5, 8, generator=torch.Generator().manual_seed(0))
        cut = Cut.even(3, 8, num_ranks=2)
        part = own_part(key, cut, group.rank)
        found = replaced(group, part, shape=key.shape, strides=key.stride(), source=cut, target=WHOLE)
        assert found.stride() == key.stride()
        assert torch.equal(found, key)

    on_ranks(2, on_rank)


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_with_keys_cut_along_their_size(groups):
    import torch.nn.functional as F

    from shardwright.torch.tensor_parallel.divided_tensor import divided, whole

    def numbers(seed, *shape):
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    data = numbers(0, 2, 2 * groups, 5, 8), numbers(1, 2, 2, 5, 8), numbers(2, 2, 2, 5, 8)
    leaves = [each.clone().requires_grad_() for each in data]
    wanted = F.scaled_dot_product_attention(*leaves, enable_gqa=groups > 1)
    wanted.sum().backward()

    def on_rank(group):
        cuts = [
            Cut.even(1, 2 * groups, num_ranks=2),
            Cut.even(3, 8, num_ranks=2),
            Cut.even(2, 5, num_ranks=2),
        ]
        own = [divided(each, cut, group).requires_grad_() for each, cut in zip(data, cuts, strict=True)]
        found = F.scaled_dot_product_attention(*own, enable_gqa=groups > 1)
        found.sum().backward()
        return [whole(each) for each in (found, *(leaf.grad for leaf in own))]

    for found in on_ranks(2, on_rank):
        for have, want in zip(found, [wanted, *(leaf.grad for leaf in leaves)], strict=True):
            torch.testing.assert_close(have, want.detach(), rtol=1e-12, atol=1e-12)


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
