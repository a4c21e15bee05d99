"""`blockwise_attention` against attention that is written out."""

import pytest
import torch
from torch import Tensor

from shardwright.torch.attention import blockwise
from shardwright.torch.attention.blockwise import Seen, blockwise_attention

B, H, Q, K, D, E = 2, 3, 11, 11, 4, 5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of few rows, so that these sequences have several."""
    monkeypatch.setattr(blockwise, "_SCORES_ON_CPU", 16 * B * H)
    monkeypatch.setattr(blockwise, "_LEAST_ROWS", 2)


def tensors(*, keys: int = K, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((B, H, Q, D), (B, H, keys, D), (B, H, keys, E))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def written_out(query: Tensor, key: Tensor, value: Tensor, *, scale: float, added: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT * scale + added, -1) @ value


def added_by(seen: Seen, *, keys: int = K) -> Tensor:
    hidden = torch.zeros(Q, keys, dtype=torch.bool)
    for row in range(Q):
        for column in range(keys):
            position = row + seen.shift
            late = column > position
            early = seen.window is not None and column <= position - seen.window
            hidden[row, column] = seen.causal and (late or early)
    return torch.zeros(Q, keys, dtype=torch.float64).masked_fill(hidden, float("-inf"))


def assert_same(result: Tensor, expected: Tensor, given: list[Tensor]) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)
    weights = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad((each * weights).sum(), given) for each in (result, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("seen", "keys"),
    [
        (Seen(), K),
        (Seen(), 7),
        (Seen(causal=True), K),
        (Seen(causal=True), 17),
        (Seen(causal=True, shift=6), 17),
        (Seen(causal=True, window=3), K),
        (Seen(causal=True, window=1), K),
        (Seen(causal=True, window=40), K),
        (Seen(causal=True, window=4, shift=6), 17),
    ],
)
def test_positions(seen, keys):
    given = tensors(keys=keys)
    result = blockwise_attention(*given, scale=0.3, seen=seen)
    assert_same(result, written_out(*given, scale=0.3, added=added_by(seen, keys=keys)), given)


@pytest.mark.parametrize("shape", [(B, H, Q, K), (B, 1, Q, K), (B, 1, 1, K), (1, H, Q, 1), (Q, K), (K,)])
def test_masks_of_numbers_get_gradients(shape):
    mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    given = [*tensors(), mask]
    result = blockwise_attention(*given[:3], scale=0.5, mask=mask)
    assert_same(result, written_out(*given[:3], scale=0.5, added=mask), given)


@pytest.mark.parametrize("hidden_score", [float("-inf"), torch.finfo(torch.float64).min])
def test_masks_of_booleans(hidden_score):
    mask = torch.rand(B, 1, Q, K) < 0.6
    mask[0, :, 3] = False  # a query that sees no key
    given = tensors()
    result = blockwise_attention(*given, scale=0.5, mask=mask, hidden_score=hidden_score)
    if hidden_score > float("-inf"):
        added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, hidden_score)
        assert_same(result, written_out(*given, scale=0.5, added=added), given)
        return
    assert result[0, :, 3].eq(0).all()
    expected = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=mask, scale=0.5)
    assert_same(result, expected, given)


@pytest.mark.thorough
def test_the_gradient_can_be_differentiated():
    given = [each[:1].detach().requires_grad_() for each in tensors()]
    assert torch.autograd.gradgradcheck(
        lambda *each: blockwise_attention(*each, scale=0.5, seen=Seen(causal=True)), given
    )


@pytest.mark.thorough
def test_dropout_is_the_same_forward_and_backward():
    """`gradcheck` compares with differences of results, for which each call must draw the same."""

    def attend(*each: Tensor) -> Tensor:
        torch.manual_seed(3)
        return blockwise_attention(*each, scale=0.5, seen=Seen(causal=True), dropout=0.4)

    assert torch.autograd.gradcheck(attend, tensors())


def test_dropout_has_the_right_distribution():
    """With values of ones a result is the sum of kept weights, scaled up: its mean is 1."""
    torch.manual_seed(0)
    query = torch.zeros(1, 1, 400, 4)
    result = blockwise_attention(query, query, torch.ones(1, 1, 400, 1), scale=1.0, dropout=0.25)
    kept_share = result * 0.75  # of 400 equal weights, each kept with a chance of 3/4
    assert abs(kept_share.mean().item() - 0.75) < 0.005
    assert abs(kept_share.std().item() - (0.75 * 0.25 / 400) ** 0.5) < 0.003
    assert blockwise_attention(query, query, query, scale=1.0, dropout=1.0).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_16_bits_are_float32(dtype):
    """Scores around 300 have a step of 2 in bfloat16: rounded ones would give other weights."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 16, 64).to(dtype) for _ in range(3))
    result = blockwise_attention(query * 8, key * 4, value, scale=1.0)
    weights = torch.softmax(query.float() * 8 @ (key.float() * 4).mT, -1).to(dtype)
    assert result.dtype is dtype
    torch.testing.assert_close(result, weights @ value, rtol=0.02, atol=0.02)


def test_a_mask_besides_positions():
    """As GPT-Neo has it: numbers are added to the scores of keys that positions hide."""
    lowest = torch.finfo(torch.float32).min
    seen = Seen(causal=True, window=3, score_beyond=lowest)
    mask = torch.ones(B, 1, Q, K, dtype=torch.bool)
    mask[0, ..., :4] = False  # rows 0 to 3 see no key
    given = tensors()
    result = blockwise_attention(
        *given, scale=1.0, mask=mask, seen=seen, hidden_score=torch.finfo(torch.float64).min
    )
    query, key, value = given
    scores = (query @ key.mT).masked_fill(added_by(seen) < 0, lowest)
    scores = scores + torch.zeros_like(scores).masked_fill(~mask, torch.finfo(torch.float64).min)
    assert_same(result, torch.softmax(scores, -1) @ value, given)
