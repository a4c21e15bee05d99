"""The run of a script: its model, optimizers and reporter."""

from shardwright.errors import UsageError
from shardwright.run.context import Context, context
from shardwright.run.reporting import Reporter
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer


class ScriptRun(Context):
    """A run, with the classes of this front end."""

    __slots__ = ()

    model: DistributedModel | None
    optimizers: list[DistributedOptimizer]
    reporter: Reporter | None


def script_run() -> ScriptRun:
    """The current run."""
    current = context()
    if not isinstance(current, ScriptRun):
        raise UsageError("this run was not begun by a script. Call shardwright.torch.init().")
    return current
