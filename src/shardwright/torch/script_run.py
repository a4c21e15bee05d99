"""The run of a script: its model, optimizers and reporter."""

from shardwright.errors import UsageError
from shardwright.torch.measuring.reporting import Reporter
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
from shardwright.torch.run.context import Context, context

__all__ = ["ScriptRun", "script_run"]


class ScriptRun(Context):
    """A run, with the classes that play the roles of `shardwright.torch.run.roles`."""

    __slots__ = ()

    model: DistributedModel | None
    optimizers: list[DistributedOptimizer]  # type: ignore[assignment]
    reporter: Reporter | None


def script_run() -> ScriptRun:
    """The current run."""
    current = context()
    if not isinstance(current, ScriptRun):
        raise UsageError("this run was not begun by a script. Call shardwright.torch.init().")
    return current
