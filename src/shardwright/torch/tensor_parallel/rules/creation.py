"""New tensors like another one: its values do not count, so a pending sum need not be taken."""

from typing import Any

from shardwright.placement import WHOLE, Cut
from shardwright.torch.tensor_parallel.call import Call
from shardwright.torch.tensor_parallel.form import Candidate
from shardwright.torch.tensor_parallel.memory_order import dense_strides
from shardwright.torch.tensor_parallel.rules.registry import rule

__all__: list[str] = []


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def like(call: Call) -> list[Candidate] | None:
    """Cut like the other tensor."""
    if len(call.inputs) != 1:
        return None
    placement = call.inputs[0].placement
    result = placement if isinstance(placement, Cut) else WHOLE
    return [Candidate((placement,), (result,), share=1 / call.num_ranks)]


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def new(call: Call) -> list[Candidate] | None:
    """Cut like the other tensor if it has the same shape."""
    if len(call.inputs) != 1:
        return None
    one = call.inputs[0]
    if one.cut is None or tuple(call["size"]) != one.shape:
        return [Candidate((one.placement,), (WHOLE,), share=0)]
    cut = one.cut

    def arguments(rank: int) -> dict[str, Any]:
        size = list(one.shape)
        size[cut.dim] = cut.length(rank)
        if call.name != "new_empty_strided":
            return {"size": size}
        return {"size": size, "stride": dense_strides(size, call["stride"])}

    return [Candidate((cut,), (cut,), arguments=arguments, share=0)]
