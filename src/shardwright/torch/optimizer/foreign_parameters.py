"""Refuses optimizers of parameters that are not the wrapped model's."""

from collections.abc import Iterable, Sequence

from torch import nn

from shardwright.errors import UsageError
from shardwright.run.context import context

__all__ = ["refuse_foreign_parameters"]


def refuse_foreign_parameters(own: Sequence[nn.Parameter], parameters: Iterable[nn.Parameter]) -> None:
    """Refuses an optimizer of another model, or of a copy; on several ranks, of more than the model."""
    of_model = {id(parameter) for parameter in parameters}
    others = [parameter for parameter in own if id(parameter) not in of_model]
    if own and len(others) == len(own):
        raise UsageError(
            f"the optimizer has {len(own)} parameters, and the wrapped model has none of them, so "
            "nothing would be trained: they belong to another model, or to a copy. Make the optimizer "
            "from the model that is wrapped, for example torch.optim.AdamW(model.parameters(), lr=3e-4)."
        )
    if others and context().mesh.world_size > 1:
        raise UsageError(
            f"{len(others)} of the {len(own)} parameters of the optimizer are not the wrapped model's "
            f"(one has shape {tuple(others[0].shape)}), so each rank would train a copy of its own, or "
            "none. Register them, or the module that has them (a loss), in the module that is wrapped: "
            "net.loss = loss_module, before sw.DistributedModel(net). A step function calls it as before."
        )
