"""Which kernel computes an attention, and why not a fused one."""

import pytest
import torch
import torch.nn.functional as F

from shardwright.torch._private.tensors import attention_kernel
from shardwright.torch.attention.blockwise import Seen
from shardwright.torch.attention.kernels import Attention, Choice, attend, choose

PLAIN = Attention(scale=0.5)
MASK = torch.ones(2, 1, 8, 8, dtype=torch.bool)


def tensors(dtype=torch.float32, *, head=4, value_head=4, key_heads=4, device="cpu"):
    query = torch.randn(2, 4, 8, head, device=device).to(dtype)
    key = torch.randn(2, key_heads, 8, head, device=device).to(dtype)
    return query, key, torch.randn(2, key_heads, 8, value_head, device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_cpu_has_a_fused_kernel_for_all_common_types(dtype):
    assert choose(*tensors(dtype), None, PLAIN) == Choice("flash")
    assert choose(*tensors(dtype), None, Attention(scale=0.5, seen=Seen(causal=True))) == Choice("flash")


@pytest.mark.parametrize(
    ("given", "mask", "attention", "why"),
    [
        (tensors(), None, Attention(scale=0.5, dropout=0.1), "dropout on a CPU"),
        (tensors(), MASK, PLAIN, "a mask of booleans on a CPU"),
        (tensors(), torch.zeros(8, 8, requires_grad=True), PLAIN, "a mask with gradients"),
        (tensors(value_head=6), None, PLAIN, "heads of 4 channels, values of 6"),
        (tensors(), None, Attention(0.5, Seen(causal=True, window=3)), "a window of 3 keys"),
        (tensors(), None, Attention(0.5, Seen(causal=True, shift=2)), "queries after earlier keys"),
        (tensors(), MASK, Attention(0.5, Seen(causal=True)), "a causal mask besides another"),
        (
            (*tensors()[:2], tensors(torch.bfloat16)[2]),
            None,
            PLAIN,
            "types of bfloat16 and float32",
        ),
    ],
)
def test_reasons(given, mask, attention, why):
    assert choose(*given, mask, attention) == Choice("blockwise", why)


def test_the_fused_kernel_is_the_one_that_runs():
    """Where the table says flash, PyTorch keeps no scores, even with masks and fewer key heads."""
    for mask in (None, torch.zeros(2, 1, 8, 8)):
        given = [each.requires_grad_() for each in tensors(key_heads=2)]
        result, choice = attend(*given, mask, PLAIN)
        assert choice == Choice("flash")
        wider = [given[0], *(each.repeat_interleave(2, dim=1) for each in given[1:])]
        assert attention_kernel((*wider, mask), dropout=0.0, causal=False, grouped=False) == "flash"
        names, functions = set(), [result.grad_fn]
        while functions:
            function = functions.pop()
            names.add(type(function).__name__)
            functions += [each for each, _ in function.next_functions if each is not None]
        assert any("FlashAttentionForCpu" in name for name in names), names


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", [None, torch.ones(8, 8, dtype=torch.bool).tril()])
def test_groups_of_queries_share_keys(key_heads, mask):
    given = tensors(torch.float64, key_heads=key_heads)
    result, _ = attend(*given, mask, Attention(scale=0.5, seen=Seen(causal=mask is None)))
    query, key, value = given
    key, value = (each.repeat_interleave(4 // key_heads, dim=1) for each in (key, value))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_transforms_of_torch_func_are_left_to_pytorch():
    query, key, value = tensors(torch.float64)
    attention = Attention(0.5, Seen(causal=True, window=3), dropout=0.0)

    def total(query):
        result, choice = attend(query, key, value, None, attention)
        assert choice == Choice("PyTorch")
        return result.sum()

    found = torch.func.grad(total)(query)
    wanted = query.clone().requires_grad_()
    attend(wanted, key, value, None, attention)[0].sum().backward()
    torch.testing.assert_close(found, wanted.grad, rtol=0, atol=1e-12)
