"""How the weights of a Hugging Face layer and those of a distributed layer correspond.

::

    GPT-2                                   distributed
    attn.c_attn.weight   (H, 3H)   ──┬──►   attention.query.weight  (H, H)     transposed, a third each
                                     ├──►   attention.key.weight
                                     └──►   attention.value.weight
    mlp.c_fc.weight      (H, 4H)   ─────►   output.dense1.weight    (4H, H)    transposed
    ln_1.weight                    ─────►   attention.pre_layernorm.weight

A `Part` is one line of such a table. It works on values and on tensors without data alike: what it gives are
views wherever it can.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.errors import UsageError


@dataclass(frozen=True, slots=True)
class Part:
    """One weight of a Hugging Face layer.

    Attributes:
        ours: names in the distributed layer. Several of them have equal shares of its output channels.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Their weight as ours."""
        if self.transposed and tensor.dim() == 2:
            tensor = tensor.t()
        shares = tensor.chunk(len(self.ours)) if len(self.ours) > 1 else (tensor,)
        if len(shares) != len(self.ours):
            raise UsageError(f"{self.theirs} has shape {tuple(tensor.shape)}, not {len(self.ours)} shares.")
        return dict(zip(self.ours, shares, strict=True))

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Ours as theirs."""
        shares = [tensors[name] for name in self.ours]
        joined = torch.cat(shares) if len(shares) > 1 else shares[0]
        return joined.t() if self.transposed and joined.dim() == 2 else joined


def linear(theirs: str, *ours: str, transposed: bool = False, bias: bool = True) -> list[Part]:
    """The parts of a linear layer, whose output channels several of ours may share."""
    weights = Part(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed)
    return [weights, *([Part(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours))] if bias else [])]


def norm(theirs: str, ours: str) -> list[Part]:
    """The parts of a normalisation."""
    return linear(theirs, ours)


def to_smdistributed(layer: Mapping[str, Tensor], parts: tuple[Part, ...], where: str) -> dict[str, Tensor]:
    """The weights of one layer under our names, in the order of theirs."""
    by_name = {part.theirs: part for part in parts}
    found: dict[str, Tensor] = {}
    for name, tensor in layer.items():
        if name not in by_name:
            raise UsageError(f"{where}{name} has no place in a distributed layer.")
        found.update(by_name[name].split(tensor))
    return found


def to_hugging_face(layer: Mapping[str, Tensor], parts: tuple[Part, ...], where: str) -> dict[str, Tensor]:
    """The weights of one layer under Hugging Face's names, in the order of ours."""
    by_name = {name: part for part in parts for name in part.ours}
    found: dict[str, Tensor] = {}
    for name in layer:
        part = by_name.get(name)
        if part is None:
            raise UsageError(f"{where}{name} has no place in a layer of Hugging Face's.")
        if missing := [each for each in part.ours if each not in layer]:
            raise UsageError(
                f"{part.theirs} is made from {', '.join(part.ours)}, and {where}{missing[0]} is not there."
            )
        if part.theirs not in found:
            found[part.theirs] = part.join(layer)
    return found
