"""A small GPT that the library and a plain loop train on one device, so that weights can be compared."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.comm._private import uses_gpus

WORDS, LENGTH, SAMPLES, PARTS = 64, 16, 8, 2


class Skipped(Exception):  # noqa: N818 - it is no error
    """A check cannot run here; its text says why."""


class Block(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = max(1, width // 64), dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(seen), self.dropout, self.training)
        fed: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + fed


def gpt(width: int = 64, *, layers: int = 4, words: int = WORDS, dropout: float = 0.0) -> nn.Module:
    blocks = (Block(width, dropout) for _ in range(layers))
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.LayerNorm(width), nn.Linear(width, words))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@dataclass(frozen=True, kw_only=True)
class Training:
    """How it is trained.

    Attributes:
        settings: of the library.
        tolerance: most that weights may differ by, relative to the largest of the parameter.
        autocast: the type of `torch.autocast`.
        rounded: the type of the weights of the plain loop, whose updates are of copies in float32.
        scaled: by a `torch.amp.GradScaler`.
        prepared: what both make of the model first; `compiled`: what the library's gets besides.
        from_meta: the model is built without memory, and gets its first values from the library.
        resumed: after two steps, from a checkpoint.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0
    autocast: torch.dtype | None = None
    rounded: torch.dtype | None = None
    scaled: bool = False
    prepared: Callable[[nn.Module], object] | None = None
    compiled: Callable[[nn.Module], nn.Module] | None = None
    from_meta: bool = False
    resumed: bool = False
    steps: int = 4

    def casts(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)

    def model(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        with torch.device("meta" if self.from_meta else device):
            model = gpt(dropout=self.dropout).to(self.dtype)
        if self.prepared is not None:
            self.prepared(model)
        return model

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, init_scale=256.0, enabled=self.scaled)

    @property
    def loss_scale(self) -> dict[str, Any]:
        return {"static_loss_scale": 128.0} if self.settings.get("fp16") else {}


def device_of_rank() -> torch.device:
    number = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", number % torch.cuda.device_count()) if uses_gpus() else torch.device("cpu")


def _batch(step: int, device: torch.device) -> Tensor:
    if step == 0:
        torch.manual_seed(1)  # of dropout
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator).to(device)


def _updated_by(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@contextmanager
def running(**settings: Any) -> Iterator[None]:
    known = {"run_dir": "off", "report": False, "microbatches": PARTS, "profile": "estimated", "plan": "anew"}
    sw.init({**known, **settings})
    try:
        yield
    finally:
        sw.shutdown()


def parity(how: Training) -> str:
    """Trains both ways; tells how much the weights differ.

    Raises:
        AssertionError: by more than they may.
    """
    device = device_of_rank()
    with tempfile.TemporaryDirectory() as folder:
        if how.resumed:
            _ours(how, device, folder, range(2))
        first, last = _ours(how, device, folder, range(2 if how.resumed else 0, how.steps))
    expected = _plainly(how, device, first)
    worst = max(_difference(last[name], value) for name, value in expected.items())
    if not worst <= how.tolerance:
        raise AssertionError(f"weights differ by {worst:.1e} of the largest, not {how.tolerance:.0e} at most")
    return f"weights differ by {worst:.0e}" if worst else "weights are equal"


def _difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


_States = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Of a model without memory, the values that it got; the last values."""


def _ours(how: Training, device: torch.device, folder: str, steps: range) -> _States:
    with running(**how.settings):
        model = how.model(device)
        model = sw.DistributedModel(model if how.compiled is None else how.compiled(model))
        optimizer = sw.DistributedOptimizer(_updated_by(model.parameters()), **how.loss_scale)
        scaler = how.scaler(device)
        checkpoints = sw.Checkpoints(folder)
        if how.resumed:
            checkpoints.resume()

        @sw.step
        def train(model: Any, ids: Tensor) -> Tensor:
            with how.casts(device):
                loss = loss_of(model, ids)
            model.backward(scaler.scale(loss))
            return loss.detach()

        run: Any = train
        first: dict[str, Tensor] = {}
        for step in steps:
            optimizer.zero_grad()
            run(model, _batch(step, device).chunk(sw.rdp_size())[sw.rdp_rank()])
            if how.from_meta and not first:
                first = _values(model)
            scaler.step(optimizer)
            scaler.update()
        if how.resumed:
            checkpoints.save(steps.stop)
        checkpoints.close()
        return first, _values(model)


def _plainly(how: Training, device: torch.device, first: dict[str, Tensor]) -> dict[str, Tensor]:
    model = how.model(device)
    if first:
        model = model.to_empty(device=device)
        model.load_state_dict(first)
    copies = [p.detach().float().clone() for p in model.parameters()] if how.rounded is not None else []
    model = model.to(how.rounded or how.dtype)
    parameters = list(model.parameters())
    optimizer, scaler = _updated_by(copies or parameters), how.scaler(device)
    scale = how.loss_scale.get("static_loss_scale", 1.0)
    for step in range(how.steps):
        optimizer.zero_grad()
        for part in _batch(step, device).chunk(PARTS):
            with how.casts(device):
                loss = loss_of(model, part) / PARTS
            torch.autograd.backward(scaler.scale(loss * scale))
            for parameter, copy in zip(parameters, copies, strict=False):
                assert parameter.grad is not None
                gradient = parameter.grad.float() / scale
                copy.grad = gradient if copy.grad is None else copy.grad + gradient
                parameter.grad = None
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for parameter, copy in zip(parameters, copies, strict=False):
                parameter.copy_(copy)
    return _values(model)
