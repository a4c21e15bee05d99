"""Random numbers: every rank draws all that one process would draw, and keeps its own.

So a dropout mask does not depend on the number of ranks, and the ranks' generators stay alike.
"""

from typing import Any

from torch import Tensor

from shardwright.torch.tensor_parallel.call import Call
from shardwright.torch.tensor_parallel.form import Candidate
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.memory_order import dense_strides
from shardwright.torch.tensor_parallel.redistribution import own_part
from shardwright.torch.tensor_parallel.rules.registry import rule

__all__ = ["draws_all"]

_FILLS = "bernoulli_ normal_ uniform_ exponential_ random_ geometric_ log_normal_ cauchy_".split()
_LIKE = "rand_like randn_like randint_like".split()


def draws_all(call: Call) -> list[Candidate] | None:
    """Other operations that draw run whole."""
    del call
    return None


@rule(*_FILLS, *_LIKE)
def fill(call: Call) -> list[Candidate] | None:
    """Fills a tensor whose values do not count."""
    one = call.inputs[0]
    if len(call.inputs) != 1 or one.cut is None or call.name == "bernoulli":
        return None
    cut = one.cut

    def draw(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        part: Tensor = args[0]
        shape = [*one.shape]
        # Draws go by the order in memory: the part has that of the whole.
        everything = part.new_empty_strided(shape, dense_strides(shape, one.strides))
        drawn = func(everything, *args[1:], **kwargs)
        own = own_part(drawn, cut, group.rank)
        return part.copy_(own) if call.written else own.clone()

    return [Candidate((cut,), (cut,), compute=draw)]


@rule("native_dropout")
def dropout(call: Call) -> list[Candidate] | None:
    """The mask of the whole tensor, and each rank's part of it."""
    one = call.inputs[0]
    if one.cut is None or not call["train"]:
        return None
    cut = one.cut

    def draw(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> tuple[Tensor, Tensor]:
        part: Tensor = args[0]
        shape = [*one.shape]
        ones = part.new_empty_strided(shape, dense_strides(shape, one.strides)).fill_(1)
        scaled, mask = func(ones, *args[1:], **kwargs)
        return part * own_part(scaled, cut, group.rank), own_part(mask, cut, group.rank).clone()

    return [Candidate((cut,), (cut, cut), compute=draw)]
