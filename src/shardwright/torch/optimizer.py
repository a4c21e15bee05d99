"""The optimizer of a rank: the user's own, with the parameters that live here."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from shardwright.errors import UsageError
from shardwright.torch.context import context, is_initialized
from shardwright.torch.glue import active_handler

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(Optimizer):
    """Wraps an optimizer, made before or after the model was wrapped.

    It may be given all parameters of the model: once the model is placed, it keeps those of this rank, so
    only they have state. Learning-rate schedulers take it as they take any optimizer.

    Args:
        optimizer: any `torch.optim.Optimizer`.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> weights = [torch.nn.Parameter(torch.zeros(2))]
        >>> optimizer = sw.DistributedOptimizer(torch.optim.SGD(weights, lr=0.1))
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """

    def __init__(self, optimizer: Optimizer):
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("this optimizer is wrapped already. Call DistributedOptimizer once.")
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"DistributedOptimizer wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}. "
                "Pass for example torch.optim.AdamW(model.parameters(), lr=3e-4)."
            )
        self.optimizer = optimizer
        if is_initialized():
            current = context()
            current.optimizers.append(self)
            if current.model is not None and current.model.partitioned:
                self.keep(current.model.local_parameter_ids())

    # What schedulers, scalers and scripts read or change is the wrapped optimizer's own.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters of this rank. A closure is not supported: run the step function before."""
        if closure is not None:
            raise UsageError("a closure cannot be pipelined. Run the step function, then optimizer.step().")
        _refuse_inside_step("step")
        self.optimizer.step()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank."""
        _refuse_inside_step("zero_grad")
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, of which this rank keeps its own parameters."""
        self.optimizer.add_param_group(param_group)
        if is_initialized() and (model := context().model) is not None and model.partitioned:
            self.keep(model.local_parameter_ids())

    def state_dict(self) -> dict[str, Any]:
        """State of the parameters of this rank."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave on a rank with the same parameters."""
        self.optimizer.load_state_dict(state_dict)

    def keep(self, identifiers: set[int]) -> None:
        """Drops every parameter, and its state, whose id is not among these."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in identifiers:
                    self.optimizer.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if id(p) in identifiers]


def _refuse_inside_step(method: str) -> None:
    if active_handler() is not None:
        raise UsageError(
            f"optimizer.{method}() is called inside a step function, which runs once for each microbatch: "
            "the gradients of a batch are there when it has returned. Call it in the training loop."
        )
