"""Imports once what forked ranks would otherwise import each."""

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Sequence

from shardwright.launch.processes import num_threads

__all__ = ["import_always", "import_once", "require_one_thread"]

# What a rank would otherwise import by itself, at 0.1 to 1 s each: creating an optimizer imports
# torch._dynamo.
_ALWAYS = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
)
_IF_THEY_IMPORT = (
    "shardwright.comm.collectives.shardwright_process_group",
    "shardwright.torch.checkpoints.checkpoints",
    "shardwright.torch.measuring.planning",
    "shardwright.torch.optimizer.distributed_optimizer",
    "shardwright.torch.startup",
    "shardwright.torch.step_function",
    "shardwright.torch.tensor_parallel.deciding",
    "torch.profiler._cupti_monitor",
)


def import_always() -> None:
    """Imports what every rank needs."""
    import_once(_ALWAYS)
    for name in _IF_THEY_IMPORT:
        # Only a head start: what cannot be imported here raises in the rank that needs it, with its
        # traceback.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    require_one_thread(())


def import_once(modules: Sequence[str]) -> None:
    """Imports the missing modules."""
    new = [name for name in modules if name not in sys.modules]
    for name in new:
        importlib.import_module(name)
    if new:
        gc.collect()
        # Otherwise each rank's first collection would touch, and so copy, every page of these modules.
        gc.freeze()


def require_one_thread(imported: Sequence[str]) -> None:
    """Refuses to go on where a module has started a thread."""
    if num_threads() > 1:
        raise RuntimeError(
            f"importing {', '.join(imported) or 'torch'} started threads ({num_threads()} run now), and a "
            "process with threads cannot be forked safely. Import the module inside the function instead of "
            "preloading it."
        )
