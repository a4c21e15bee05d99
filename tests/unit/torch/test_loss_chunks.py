"""Logits of a head that a loss computes piece by piece: numbers and gradients of the head's own."""

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.run.context import context
from shardwright.torch.backward.loss_reduction import form_of_loss
from shardwright.torch.backward.pending_logits import PendingLogits
from shardwright.torch.backward.waiting_heads import heads_may_wait, mark_heads

V, H = 13, 6
IDS = torch.arange(15).reshape(3, 5) % V
LABELS = IDS.clone()
LABELS[0, :3] = -100
OF_CLASSES = torch.linspace(0.1, 1.0, V, dtype=torch.float64)


class Words(nn.Module):
    def __init__(self, bias: bool = True, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, H, dtype=dtype)
        self.middle = nn.Linear(H, H, dtype=dtype)
        self.head = nn.Linear(H, V, bias=bias, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


def soft(logits: Tensor) -> Tensor:
    return torch.softmax(torch.arange(15.0 * V, dtype=logits.dtype).view(15, V).sin(), -1)


def masked(logits: Tensor) -> Tensor:
    kept = LABELS != -100
    return F.cross_entropy(logits[kept], LABELS[kept])


def written(logits: Tensor) -> Tensor:
    logits[..., :2] = -5.0
    return F.cross_entropy(logits.view(-1, V), LABELS.view(-1))


class Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


IN_PIECES: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda z: F.cross_entropy(z.view(-1, V), LABELS.view(-1)),
    "shifted": lambda z: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, z.size(-1)), LABELS[..., 1:].flatten()
    ),
    "channels": lambda z: F.cross_entropy(z.transpose(1, 2), LABELS, reduction="sum"),
    "permuted": lambda z: F.cross_entropy(z.permute(0, 2, 1), IDS, ignore_index=3),
    "capped": lambda z: F.cross_entropy((torch.tanh(z / 3) * 3).flatten(0, 1), LABELS.flatten()),
    "weights": lambda z: F.cross_entropy(z.flatten(0, 1), LABELS.flatten(), OF_CLASSES, label_smoothing=0.1),
    "smoothed": lambda z: F.cross_entropy(z.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1),
    "each": lambda z: (
        (F.cross_entropy(z.transpose(1, 2), LABELS, reduction="none") * torch.arange(5)).sum() / 7
    ),
    "z loss": lambda z: F.cross_entropy(z.flatten(0, 1), LABELS.flatten()) + z.logsumexp(-1).square().mean(),
    "log probabilities": lambda z: -z.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).mean(),
    "nll": lambda z: F.nll_loss(F.log_softmax(z, dim=-1).view(-1, V), LABELS.view(-1)),
    "nll each": lambda z: F.nll_loss(z.view(-1, V).log_softmax(1), LABELS.view(-1), reduction="none").sum(),
    "probabilities": lambda z: F.cross_entropy(z.view(-1, V), soft(z)),
    "masked": masked,
    "last": lambda z: F.cross_entropy(z[:, -1], IDS[:, 0]),
    "float": lambda z: F.cross_entropy(z.double().to(z.device).view(-1, V), LABELS.view(-1)),
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda z: z.square().mean() + F.cross_entropy(z.view(-1, V), LABELS.view(-1)),
    "accuracy": lambda z: (
        F.cross_entropy(z.view(-1, V), LABELS.view(-1)) + 0 * (z.argmax(-1) == IDS).double().mean()
    ),
    "function": lambda z: Ones.apply(z).mean(),
    "samples": lambda z: F.cross_entropy(z.transpose(0, 2), torch.zeros(V, 3, dtype=torch.int64)),
    "columns": lambda z: z[..., :4].sum(),
}


def trained(
    model: Words, loss: Callable[[Tensor], Tensor], *, chunks: int | str
) -> tuple[Tensor, list[Tensor | None]]:
    mark_heads(model, chunks)
    model.zero_grad()
    with heads_may_wait():
        value = loss(model(IDS))
    value.backward()
    return value.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", [*IN_PIECES, *WHOLE])
def test_losses_are_those_of_whole_logits(name: str, bias: bool) -> None:
    loss = {**IN_PIECES, **WHOLE}[name]
    whole = trained(Words(bias), loss, chunks="off")
    torch.testing.assert_close(trained(Words(bias), loss, chunks=4), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", IN_PIECES)
def test_the_head_is_never_run_on_all_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where each row has a loss of its own, whose gradient comes later."""
    sizes: list[int] = []
    linear = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(weight) == V:
            sizes.append(x.numel() // H)
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    trained(Words(), IN_PIECES[name], chunks=4)
    assert sizes
    assert max(sizes) <= 4


def test_a_label_that_counts_nowhere_has_no_gradient() -> None:
    """A mean over no labels is NaN, and its gradient 0: as PyTorch has it."""
    nothing = torch.full((15,), -100)
    for chunks in ("off", 4):
        loss, gradients = trained(Words(), lambda z: F.cross_entropy(z.view(-1, V), nothing), chunks=chunks)
        assert loss.isnan()
        assert all(gradient is None or not gradient.any() for gradient in gradients)


def test_a_backward_may_come_twice() -> None:
    model = Words()
    mark_heads(model, 4)
    with heads_may_wait():
        loss = IN_PIECES["flat"](model(IDS))
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    loss.backward()
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=1e-12, atol=0)


@pytest.mark.parametrize("trained_part", ["embedding", "head", "head.bias"])
def test_what_is_frozen_gets_no_gradient(trained_part: str) -> None:
    found = []
    for chunks in ("off", 4):
        model = Words()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(trained_part))
        found.append(trained(model, IN_PIECES["shifted"], chunks=chunks))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["shifted", "each"])
def test_under_autocast(name: str) -> None:
    """In 16 bits each piece of the weight's gradient is rounded: the error is theirs."""
    found = []
    for chunks in ("off", 4):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(trained(Words(dtype=torch.float32), IN_PIECES[name], chunks=chunks))
    (whole, of_whole), (pieces, of_pieces) = found
    assert pieces.dtype == whole.dtype
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=0)
    for mine, theirs in zip(of_pieces, of_whole, strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() < 0.02 * theirs.norm()


def test_an_evaluation_computes_pieces_too() -> None:
    model = Words()
    mark_heads(model, 4)
    with torch.no_grad(), heads_may_wait():
        logits = model(IDS)
        loss = IN_PIECES["flat"](logits)
    assert isinstance(logits, PendingLogits)
    assert not loss.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(loss, IN_PIECES["flat"](model(IDS)))


def test_pending_logits_answer_as_logits_do() -> None:
    model = Words()
    whole = model(IDS)
    mark_heads(model, 4)
    with heads_may_wait():
        logits = model(IDS)
        assert isinstance(logits, PendingLogits)
        for ask in (
            lambda z: (z.shape, z.dtype, z.device, z.requires_grad, z.stride(), z.is_contiguous(), z.dim()),
            lambda z: (z.numel(), z.size(-1), z.is_floating_point(), z.is_cuda, z.layout, len(z)),
            lambda z: (z[:, :-1].is_contiguous(), z.float().dtype, z.transpose(1, 2).shape),
        ):
            assert ask(logits) == ask(whole)
        assert logits.double() is logits
        assert logits.contiguous() is logits
        assert F.dropout(logits, 0.0) is logits
        assert torch.equal(logits.detach(), whole)  # and from here on it is computed


def through_a_view(logits: Tensor) -> Tensor:
    flat = logits.contiguous().double().view(-1, V)
    flat[:, :2] = -5.0
    flat.mul_(2)
    return F.cross_entropy(flat, LABELS.view(-1))


def followed_without_gradients(logits: Tensor) -> Tensor:
    """A target that follows from logits is none of what is trained."""
    with torch.no_grad():
        target = logits / 2
    return F.cross_entropy(logits.view(-1, V), LABELS.view(-1)) + F.mse_loss(logits, target)


def looked_at(logits: Tensor) -> Tensor:
    with torch.inference_mode():
        logits.argmax(-1)
    return F.cross_entropy(logits.view(-1, V), LABELS.view(-1))


def through_slices(logits: Tensor) -> Tensor:
    flat = logits.view(-1, V)
    logits[:, 0].fill_(1.0)
    for row in range(3):
        logits[row, 1:, 3].mul_(0.5)
    return F.cross_entropy(flat, LABELS.view(-1)) + F.cross_entropy(logits.transpose(1, 2), LABELS)


def through_a_view_of_what_is_whole(logits: Tensor) -> Tensor:
    flat = logits.view(-1, V)
    logits.argmax(-1)
    logits[:, 0].fill_(1.0)
    return F.cross_entropy(flat, LABELS.view(-1))


def in_other_types(logits: Tensor) -> Tensor:
    floored = torch.div(logits, 2, rounding_mode="floor").view(-1, V)
    return F.cross_entropy(floored, LABELS.view(-1)) + F.cross_entropy(
        logits.type("torch.FloatTensor").view(-1, V), LABELS.view(-1)
    )


BESIDES = [
    written,
    through_a_view,
    through_slices,
    through_a_view_of_what_is_whole,
    followed_without_gradients,
    looked_at,
    in_other_types,
]


@pytest.mark.parametrize("loss", BESIDES)
def test_what_a_script_does_besides_counts_as_it_would(loss: Callable[[Tensor], Tensor]) -> None:
    whole = trained(Words(), loss, chunks="off")
    torch.testing.assert_close(trained(Words(), loss, chunks=4), whole, rtol=1e-6, atol=1e-9)


def test_what_would_not_be_seen_is_refused() -> None:
    model = Words()
    mark_heads(model, 4)
    with heads_may_wait():
        x = torch.ones(3, 5, H, dtype=torch.float64)
        for changed in (x, model.head.weight, model.head.bias):
            logits = model.head(x)
            with torch.no_grad():
                changed.add_(1.0)
            with pytest.raises(UsageError, match=r"has changed in place since the head was called, .*: off"):
                IN_PIECES["flat"](logits)
        logits = model(IDS)
        loss = IN_PIECES["flat"](logits)
        with pytest.raises(UsageError, match=r"grad\(\) wants the gradient of logits, and their loss"):
            torch.autograd.grad(loss, logits)
        with pytest.raises(UsageError, match=r"a gradient of a gradient .* loss_chunks: off"):
            torch.autograd.grad(loss, model.embedding.weight, create_graph=True)
        beside = model.middle.bias.sum()
        with pytest.raises((UsageError, RuntimeError), match=r"expected device meta|past Python"):
            (torch.vmap(F.cross_entropy)(model(IDS), IDS).sum() + beside).backward()


def test_weights_of_classes_are_those_of_the_forward() -> None:
    def loss(logits: Tensor) -> Tensor:
        weights = OF_CLASSES.clone()
        each = F.cross_entropy(logits.view(-1, V), LABELS.view(-1), weights, reduction="none")
        if isinstance(logits, PendingLogits):
            weights.zero_()
        return each.sum()

    found, whole = (trained(Words(), loss, chunks=chunks) for chunks in (4, "off"))
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_mask_may_pick_nothing(reduction: str) -> None:
    def loss(logits: Tensor) -> Tensor:
        none = LABELS > V
        return F.cross_entropy(logits[none], LABELS[none], reduction=reduction).sum()

    found, whole = (trained(Words(), loss, chunks=chunks) for chunks in (4, "off"))
    torch.testing.assert_close(found, whole, equal_nan=True)


def test_half_precision_does_not_overflow_before_the_mean() -> None:
    """A mean over 40,000 rows of one label: their sum is beyond the largest number of 16 bits."""
    head = nn.Linear(H, V, dtype=torch.float16)
    mark_heads(head, 40)
    with heads_may_wait():
        logits = head(input=torch.full((2, 20_000, H), 4.0, dtype=torch.float16))
        F.cross_entropy(logits.view(-1, V), torch.zeros(40_000, dtype=torch.int64)).backward()
    assert head.weight.grad is not None
    assert head.weight.grad.dtype is torch.float16
    assert head.weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_loss_gets_logits_whole() -> None:
    """What traces it found no memory: an internal error."""
    compiled = torch.compile(IN_PIECES["flat"], backend="aot_eager")
    found, whole = (trained(Words(), compiled, chunks=chunks) for chunks in (4, "off"))
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_a_frozen_body_is_read_as_it_is(reduction: str) -> None:
    """Only the head is trained: a sum was taken for a mean, where microbatches were weighed."""
    found = []
    for chunks in ("off", 4):
        model = Words()
        for frozen in (model.embedding, model.middle):
            frozen.requires_grad_(False)
        mark_heads(model, chunks)
        with heads_may_wait():
            loss = F.cross_entropy(model(IDS).view(-1, V), LABELS.view(-1), reduction=reduction)
        form = form_of_loss(loss, samples=3)
        found.append((form.reduction, [count() for count in form.counts]))
    assert found[0] == found[1]


def test_a_number_of_pieces_is_told_to_be_in_vain(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trained(Words(), WHOLE["accuracy"], chunks=4)
    (record,) = caplog.records
    assert "test_loss_chunks.py" in record.getMessage()
    assert "the logits of head are used here otherwise than in a loss" in record.getMessage()


def test_large_logits_are_left_to_the_loss_unless_all_are_needed() -> None:
    """By themselves: where they take more memory than the gradient of the weight, and are not read."""
    head = nn.Linear(4, 2**15)
    mark_heads(head, "auto")
    with heads_may_wait():
        assert not isinstance(head(torch.ones(1, 100, 4)), PendingLogits)
        logits = head(torch.ones(1, 200, 4))
        assert isinstance(logits, PendingLogits)
        with torch.no_grad():  # an evaluation that needs all says nothing of the training
            head(torch.ones(1, 200, 4)).argmax(-1)
            assert not isinstance(head(torch.ones(1, 200, 4)), PendingLogits)
        assert isinstance(head(torch.ones(1, 200, 4)), PendingLogits)
        logits.argmax(-1)
        assert not isinstance(head(torch.ones(1, 200, 4)), PendingLogits)


def test_a_head_goes_when_nobody_has_it() -> None:
    """A copy of it that was timed stayed, with its weight, until Python looked for circles."""
    gc.collect()
    gc.disable()
    try:
        head = nn.Linear(H, V)
        mark_heads(head, 4)
        twin, gone = copy.deepcopy(head), weakref.ref(head)
        del head
        assert gone() is None
        assert twin(torch.ones(2, H)).shape == (2, V)
    finally:
        gc.enable()


def test_a_head_that_is_copied_or_saved_whole_is_a_head(tmp_path: Path) -> None:
    """A file of a whole module is read where this library is not."""
    model = Words()
    mark_heads(model, 4)
    with heads_may_wait():
        twin = copy.deepcopy(model)
        assert isinstance(twin(IDS), PendingLogits)
        assert twin.head.forward._head is twin.head
    torch.save(model.head, tmp_path / "head.pt")
    assert b"shardwright" not in (tmp_path / "head.pt").read_bytes()
    loaded = torch.load(tmp_path / "head.pt", weights_only=False)
    assert mark_heads(loaded, 4) == [""]
    x = torch.ones(2, H, dtype=torch.float64)
    assert torch.equal(loaded(x), model.head(x))


class Recomputed(Words):
    """All of it is computed again in the backward; or a part, from which logits leave."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.middle(x)))

        return checkpoint(inside, self.embedding(ids), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_head_that_the_script_recomputes_does_not_wait(reentrant: bool) -> None:
    whole = trained(Recomputed(reentrant), IN_PIECES["shifted"], chunks="off")
    found = trained(Recomputed(reentrant), IN_PIECES["shifted"], chunks=4)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-14)


def test_a_weight_that_is_computed_is_asked_for_once() -> None:
    """A spectral norm changes its estimate whenever it is: a training went another way."""
    head = nn.utils.parametrizations.spectral_norm(nn.Linear(H, V))
    assert mark_heads(head, 4) == []
    model = nn.Linear(H, V)
    mark_heads(model, 4)
    nn.utils.parametrizations.spectral_norm(model)
    with heads_may_wait():
        assert not isinstance(model(torch.ones(3, 5, H)), PendingLogits)


def test_a_head_without_gradients_stays_without() -> None:
    model = Words()
    mark_heads(model, 4)
    with heads_may_wait():
        with torch.no_grad():
            logits = model(IDS)
        assert not logits.requires_grad
        assert not IN_PIECES["flat"](logits).requires_grad
        seen: list[Tensor] = []
        logits = model(IDS)
        logits.register_hook(seen.append)
        IN_PIECES["flat"](logits).backward()
        assert len(seen) == 1


def test_only_the_largest_layers_are_heads() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 32))
    assert mark_heads(model, "auto") == []  # small ones cost too little to be worth the question
    assert mark_heads(model, 2) == ["1", "3"]
    assert mark_heads(model, 2) == ["1", "3"]
    assert mark_heads(nn.Sequential(nn.Linear(2, 3)), "off") == []


def test_a_plan_knows_what_pieces_keep() -> None:
    """Logits and their log softmax are 2 x 3 MB here; the gradient of the weight takes 0.4 MB."""
    kept, work = {}, {}
    for chunks in ("off", 8):
        sw.init({"loss_chunks": chunks, "profile": "estimated", "plan_one_stage": True, "run_dir": "off"})
        try:
            model = sw.DistributedModel(
                nn.Sequential(nn.Embedding(3000, 32), nn.LayerNorm(32), nn.Linear(32, 3000))
            )
            sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

            @sw.step
            def train(model: Any, ids: Tensor) -> Tensor:
                loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                model.backward(loss)
                return loss

            train(model, torch.zeros(1, 256, dtype=torch.int64))
            plan = context().plan
            assert plan is not None
            (memory,) = plan.prediction.memory
            kept[chunks], work[chunks] = memory.activations_bytes, memory.work_bytes
        finally:
            sw.shutdown()
    logits = 256 * 3000 * 4
    assert kept["off"] > logits
    assert kept[8] < kept["off"] - logits + 4 * 32 * 3000 + 2**16
    assert work["off"] > 1.5 * logits
    assert work[8] < logits
