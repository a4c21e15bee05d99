"""What a script is told that asks for a part of Horovod which is not here."""

from collections.abc import Callable
from typing import Any

from shardwright.errors import UsageError

_START = "Ranks are started from outside: shardwright run -n 2 train.py, torchrun, Slurm or MPI."
_ELASTIC = (
    "A run that loses ranks starts again from its last checkpoint, on those that are left: shardwright run "
    "--max-restarts 3, with the script's own checkpoints or sw.Checkpoints."
)
_REMEDIES = {
    "Adasum": "Use op=hvd.Average or op=hvd.Sum, with learning rates for those.",
    "run": _START,
    "runner": _START,
    "elastic": _ELASTIC,
    "join": "Give all ranks as many batches, as torch.utils.data.DistributedSampler does.",
    "Product": "Use op=hvd.Average, hvd.Sum, hvd.Min or hvd.Max.",
    "SyncBatchNorm": "Use torch.nn.SyncBatchNorm.",
    "add_process_set": "Groups of ranks: torch.distributed.new_group.",
    "ProcessSet": "Groups of ranks: torch.distributed.new_group.",
}


class NotHereError(UsageError, AttributeError):
    """A part of Horovod that is not here."""


def names_not_here(module: str) -> Callable[[str], Any]:
    """Makes the `__getattr__` of a module of ours, which says what to do instead of a name."""

    def refuse(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise NotHereError(
            f"{module}.{name} is not here: this is a small part of Horovod, over Shardwright. "
            + _REMEDIES.get(name, "compat/README.md lists its names; a real Horovod takes its place.")
        )

    return refuse
