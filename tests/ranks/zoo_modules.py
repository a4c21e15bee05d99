"""Small models, each with one habit of real code that a pipeline must not disturb.

Shape suffixes: B batch, T time, D width, C classes or channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
CLASSES = 7


class Block(nn.Module):
    """A residual block, the unit of most models here."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.down(F.gelu(self.up(self.norm(x_BTD))))


class Stack(nn.Module):
    """Blocks and a head: what the models below vary."""

    def __init__(self, num_blocks: int = 6):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CallsOneModuleTwice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        first, shared, *rest = self.blocks
        x = shared(first(x))
        for block in rest:
            x = block(x)
        return self.head(shared(x))


class DropoutBetweenBlocks(Stack):
    """Random numbers are drawn by glue: by a function and by a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(self.dropout(x))
            if number % 2:
                x = F.dropout(x, 0.2, training=self.training)
        return self.head(x)


class DropoutInBlocks(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.2), Block()) for _ in range(4))


class TiedEmbeddings(nn.Module):
    """The head's weight is the embedding's, at the other end of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.embedding(ids_BT)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ReturnsDictionary(Stack):
    """Hands out what several stages computed."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return {"logits": self.head(x), "hidden": hidden, "size": len(hidden)}


class ParametersInGlue(Stack):
    """Parameters that no module of their own holds: positions, a scale for every block, a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.positions_TD = nn.Parameter(torch.randn(32, WIDTH))
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in self.blocks)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions_TD[: x.shape[1]]
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = block(x) * scale
        return self.head(x) / self.temperature


class ChangesInPlace(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        skip = x
        for block in self.blocks[1:]:
            y = block(x)
            y += skip
            y[:, 0] = y[:, 1] * 2
            y.mul_(0.5)
            x = y
        last = x[:, -1]
        last.add_(1.0)  # a view: x changes too
        return self.head(x)


class FillsOneTensor(Stack):
    """A tensor that the first stage makes and every stage writes to, as recurrent models collect outputs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        total = torch.zeros_like(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            total[:, number] = x[:, 0]
            total[:, -1] += x[:, 1]
        return self.head(x + total)


class ChangesViews(Stack):
    """Every stage writes to views: of what the first stage made, and of a tensor that all ranks have."""

    def forward(self, x: Tensor) -> Tensor:
        x_BTD = self.blocks[0](x)
        x_BDT = x_BTD.transpose(1, 2)
        total = torch.zeros(x.shape, dtype=x.dtype)
        y = x_BTD * 1.0
        for number, block in enumerate(self.blocks[1:]):
            y = block(y)
            x_BDT[:, number] += y[..., 0]
            first = total[..., 0]
            first.add_(y[..., 1])
            total[:, -1] += y[:, number]
            y = y.tanh() + x_BTD
        return self.head(y * x_BTD.sum(1, keepdim=True) + total)


class Shift(nn.Module):
    """Its backward does not need its input, which may be changed afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class ChangesWhatAnotherStageReads(nn.Module):
    """What crosses to the next stage is changed in place before the first stage ends."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.shift, self.head = Block(), Shift(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        shifted = self.shift(x)
        x.mul_(0.5)
        return self.head(x + shifted)


class AddsToWhatItGets(nn.Module):
    """A residual in place, and nothing but that has a gradient for what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_((x.detach().clone() @ self.weight).relu()).flatten(0, 1).unflatten(0, x.shape[:2])


class AddsToViews(nn.Module):
    """Units that give a view, and get one, which they change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, CLASSES)
        self.adds = nn.ModuleList(AddsToWhatItGets() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        for add in self.adds:
            x = add(x)
        return self.head(x)


class ChangesItsInput(Stack):
    """The caller's batch is changed in place, once a microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return super().forward(x)


class ParameterFreeMiddle(nn.Module):
    """Much computing between the blocks that no parameter takes part in, on complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(Block() for _ in range(2))
        self.after = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x_BTD: Tensor) -> Tensor:
        for block in self.before:
            x_BTD = block(x_BTD)
        spectrum = torch.fft.rfft(x_BTD, dim=1)
        x_BTD = self.after[0](x_BTD) + torch.fft.irfft(spectrum * spectrum.abs(), n=x_BTD.shape[1], dim=1)
        return self.head(self.after[1](x_BTD) + spectrum.real.mean(1, keepdim=True))


class TransposesBetweenBlocks(nn.Module):
    """Blocks hand on tensors that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.mixers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x_BTD: Tensor) -> Tensor:
        for block, mixer in zip(self.blocks, self.mixers, strict=True):
            x_BDT = mixer(block(x_BTD).transpose(1, 2))
            x_BTD = x_BDT.transpose(1, 2)[:, ::1]
        return self.head(x_BTD)


class MaskedBlock(Block):
    def forward(self, x_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = super().forward(x_BTD).masked_fill(~mask_BT[..., None], 0.0)
        return x_BTD, mask_BT & (x_BTD.sum(-1) > -3.0)


class BooleanMasks(nn.Module):
    """Every block makes the mask for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[..., 0] > -2.0
        for block in self.blocks:
            x, mask = block(x, mask)
        return self.head(torch.where(mask[..., None], x, torch.zeros_like(x)))


class TwoTowers(nn.Module):
    """Two independent stacks, compared at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Stack(3), Stack(3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a = F.normalize(self.left(left).mean(1), dim=-1)
        b = F.normalize(self.right(right).mean(1), dim=-1)
        return self.scale.exp() * a @ b.T


class NestedInputs(Stack):
    """Containers in containers go in, and between blocks."""

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        first, (second, third) = inputs["pair"]
        state = {"x": first, "others": [second, third * inputs["factor"]]}
        for block in self.blocks:
            state = {"x": block(state["x"] + state["others"][0]), "others": state["others"][::-1]}
        return self.head(state["x"])


class HooksCollectOutputs(Stack):
    """Forward hooks gather what every block returns, as transformers gathers hidden states."""

    def forward(self, x: Tensor) -> Tensor:
        gathered: list[Tensor] = []
        hooks = [b.register_forward_hook(lambda _, __, out: gathered.append(out)) for b in self.blocks]
        for block in self.blocks:
            x = block(x)
        for hook in hooks:
            hook.remove()
        return self.head(x + torch.stack(gathered).mean(0))


class ReversesGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.factor * gradients[0], None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return gradients[0] * y, gradients[0] * x


class CustomFunctions(Stack):
    """Functions with a backward of their own between the blocks, some on tensors of two stages."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = ReversesGradients.apply(Product.apply(block(x), first), 0.5)
        return self.head(x)


class Recomputes(Stack):
    """The user checkpoints activations by hand."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=x.requires_grad and number % 2 == 1)
        return self.head(x)


class NoGradComesFirst(Stack):
    """What a stage reads without gradients it reads again with them, and changes without them."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x) * 1.0
        x = first + 1.0
        for block in self.blocks[1:]:
            with torch.no_grad():
                mean = block(first + x).mean(1, keepdim=True)
            x = block(x + mean) + first
        x = x * 1.0
        with torch.no_grad():
            first.mul_(0.5)
            x[:, 0] += first[:, 0]
        return self.head(x.tanh() + first)


class DeepSupervision(Stack):
    """Every block has a head of its own, and the loss sums over all."""

    def __init__(self) -> None:
        super().__init__(5)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in self.blocks)

    def forward(self, x: Tensor) -> list[Tensor]:
        answers = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            answers.append(head(x))
        return [*answers, self.head(x)]


class UnusedParameters(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(WIDTH, WIDTH)
        self.lonely = nn.Parameter(torch.ones(3))


class BuffersInGlue(Stack):
    """Buffers change between the blocks: made anew, written to at a place, counted, by a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.zeros(3, WIDTH))
        self.register_buffer("next", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        for block in self.blocks[:4]:
            x = block(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks[4:]:
            x = block(x)
        x = x + self.queue.clone().mean(0)
        if self.training:
            at = int(self.next)
            self.queue[at] = x.detach().mean((0, 1))
            self.next[0] = (at + 1) % len(self.queue)
        return self.head(x - self.mean) / (1 + self.count)


class StatefulBlock(nn.Module):
    """Makes its running mean anew, and changes buffers whenever its weight is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        return x + torch.tanh(y - self.mean)


class StatefulBlocks(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StatefulBlock() for _ in self.blocks)


class ReadsBeforeItChanges(Stack):
    """The first stage reads what the last one changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.mean
        for block in self.blocks:
            x = block(x)
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.head(x)


class SharesAStage(Stack):
    """In the middle: a checkpoint over two blocks, a gradient, a buffer and a parameter that change late."""

    def __init__(self) -> None:
        super().__init__(10)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.shift = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor, scale: Tensor) -> Tensor:
            return self.blocks[2](torch.tanh(self.blocks[1](x) * scale))

        first = self.blocks[0](x)
        x = checkpoint(run, first, first.mean().sigmoid(), use_reentrant=False) + first
        centre = self.mean * 2
        x = self.blocks[4](self.blocks[3](x) - centre)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        shifted = self.blocks[5](x) + self.shift
        with torch.no_grad():
            self.shift.clamp_(0, 1)
        x = self.blocks[6](shifted) + self.shift
        start = self.blocks[7](x) * 1.0
        x = self.blocks[8](start)
        if torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad(x.square().sum(), start, create_graph=True)
            x = x + gradient
        return self.head(self.blocks[9](x) + first)


class RecomputesAcrossBlocks(Stack):
    """Checkpoints all blocks at once."""

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

        return self.head(checkpoint(run, x, use_reentrant=False))


class ClampsAParameter(Stack):
    """A parameter that several stages read is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.shift.clamp_(0, 1)
        for block in self.blocks:
            x = block(x) + self.shift
        return self.head(x) * self.shift.mean()


class TakesAGradient(Stack):
    """A gradient is taken through several stages, inside the forward."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        (gradient,) = torch.autograd.grad(x.square().sum(), first, create_graph=True)
        return self.head(x + gradient)


class ChangesAShape(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            mean = x.mean(1)
            mean.unsqueeze_(1)
            x = x + mean
        return self.head(x)


class ChangesADetachedName(Stack):
    """Another stage changes the data of a tensor past autograd."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x) * 1.0
        x = first + 1.0
        for block in self.blocks[1:]:
            x = block(x)
        first.detach().add_(x.detach())
        return self.head(x + first)
