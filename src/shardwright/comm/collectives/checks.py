"""Refuses tensors that a collective cannot take."""

from torch import Tensor

from shardwright.errors import UsageError

__all__ = ["check_fit"]


def check_fit(collective: str, data: Tensor, output: Tensor, num_ranks: int) -> None:
    """Refuses tensors that do not fit a collective."""
    num_outputs = data.numel()
    if collective in ("all_gather", "gather_to_nodes"):
        num_outputs *= num_ranks
    elif collective == "reduce_scatter":
        num_outputs //= num_ranks
    if output.numel() != num_outputs or (collective == "reduce_scatter" and data.numel() % num_ranks):
        raise UsageError(
            f"{collective} over {num_ranks} ranks takes {data.numel()} elements and gives {num_outputs}, "
            f"but the output has {output.numel()}."
        )
    if data.dtype != output.dtype:
        raise UsageError(
            f"{collective}: the input is {data.dtype} and the output {output.dtype}; they must be the same."
        )
    for name, tensor in (("input", data), ("output", output)):
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise UsageError(
                f"{collective}: the {name} must be contiguous and on the CPU, but it has the strides "
                f"{tensor.stride()} and is on {tensor.device}. Pass {name}.contiguous()."
            )
