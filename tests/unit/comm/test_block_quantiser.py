"""Eight bits keep what they promise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.comm.collectives.block_quantiser import BlockQuantiser


@settings(deadline=None)
@given(count=st.integers(0, 700), block=st.sampled_from([1, 16, 256]), seed=st.integers(0, 100))
def test_errors_are_half_a_level_of_their_block(count, block, seed):
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 7 - 3)
    quantiser = BlockQuantiser(block)
    packed = quantiser.pack(numbers)
    assert packed.dtype is torch.uint8
    assert packed.numel() == quantiser.num_bytes(count)
    found = quantiser.unpack(packed, torch.empty(count))
    for start in range(0, count, block):
        part, rounded = numbers[start : start + block], found[start : start + block]
        assert (rounded - part).abs().max() <= part.abs().max() / 254 * (1 + 1e-5)
    assert quantiser.largest_error <= 1 / 254 * (1 + 1e-5)
    if count:
        lost = (found - numbers).norm() / numbers.norm()
        assert quantiser.relative_error == pytest.approx(lost.item(), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype):
    numbers = torch.tensor([0.0, 0.0, 1.0, -127.0], dtype=dtype)
    quantiser = BlockQuantiser(2)
    assert torch.equal(quantiser.unpack(quantiser.pack(numbers), torch.empty(4, dtype=dtype)), numbers)
    assert quantiser.relative_error == 0.0
