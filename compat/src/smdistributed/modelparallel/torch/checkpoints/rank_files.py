"""What each rank writes into a partial checkpoint, and reads from it.

::

    model_{pp}_{tp}.pt           what a partition holds of the model
    optimizer_{pp}_{tp}.pt       the optimizer's state of its parameters
    fp16_states_{pp}_{tp}.pt     the loss scale, and copies in float32, where the model is in 16 bits
                                 with the replica as a third number where replicas share the optimizer's state

Where replicas share parameters, the files are others: see `sharded_rank_files`.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.errors import CorruptCheckpointError
from shardwright.torch.startup import ScriptRun
from smdistributed.modelparallel.torch.checkpoints.sharded_rank_files import (
    optimizer_state_in,
    sharded_contents,
    weights_in,
)
from smdistributed.modelparallel.torch.pickles.files import load_file

_OF_16_BITS = ("fp32_master_params", "loss_scaler")


def contents_of_this_rank(run: ScriptRun, model: Any, optimizer: Any) -> dict[str, Any]:
    """What this rank writes, by name of the file.

    Collective over the ranks with the same stage, where they share something.
    """
    if run.mesh.shard > 1:
        contents = sharded_contents(run, model, optimizer)
        writes = run.data_rank < run.mesh.shard and run.tensor_rank == 0
        if run.model is not None and model.scaling is not None and writes:
            contents[_fp16_file(run)] = {"loss_scaler": asdict(model.scaling.scaler)}
        return contents
    contents = {}
    if run.data_rank == 0:
        contents[_model_file(run)] = model.local_state_dict()
    if optimizer is not None and (run.data_rank == 0 or _shares_state(run)):
        saved = optimizer.local_state_dict(gather_if_shard=False)
        of_16_bits = {key: saved.pop(key) for key in _OF_16_BITS if key in saved}
        contents[_optimizer_file(run)] = saved
        if of_16_bits:
            contents[_fp16_file(run)] = of_16_bits
    return contents


def model_state(run: ScriptRun, folder: Path) -> dict[str, Any]:
    """What this rank loads into its model."""
    if run.mesh.shard > 1:
        return {**weights_in(folder, run.pipeline_rank)[0], "_smp_is_partial": True}
    state: dict[str, Any] = load_file(folder / _model_file(run), "cpu", mmap=True)
    return state


def optimizer_state(run: ScriptRun, folder: Path, *, shared_too: bool) -> dict[str, Any] | None:
    """What this rank loads into its optimizer; None where that was not saved, or is not wanted."""
    fp16 = folder / _fp16_file(run)
    of_16_bits: dict[str, Any] = load_file(fp16, "cpu") if fp16.is_file() else {}
    if run.mesh.shard > 1:
        weights, _ = weights_in(folder, run.pipeline_rank)
        state = optimizer_state_in(folder, run.pipeline_rank, weights, with_state=shared_too)
        return None if state is None else {**state, **of_16_bits}
    path = folder / _optimizer_file(run)
    if not path.is_file():
        if any(folder.glob("optimizer_*.pt")):
            shared, saved = _shares_state(run), any(folder.glob("optimizer_*_*_*.pt"))
            raise CorruptCheckpointError(
                f"{folder} has no {path.name}: the optimizer's state was {'' if saved else 'not '}shared by "
                f"replicas when it was saved, and is {'' if shared else 'not '}shared now. Set "
                f"shard_optimizer_state {saved}, or resume with load_optimizer=False."
            )
        return None
    if _shares_state(run) and not shared_too:
        return None
    return {**load_file(path, "cpu"), **of_16_bits}


def _shares_state(run: ScriptRun) -> bool:
    return bool(run.config.shard_optimizer_state) and run.mesh.data > 1


def _model_file(run: ScriptRun) -> str:
    return f"model_{run.pipeline_rank}_{run.tensor_rank}.pt"


def _optimizer_file(run: ScriptRun) -> str:
    return f"optimizer_{_own_numbers(run)}.pt"


def _fp16_file(run: ScriptRun) -> str:
    if run.mesh.shard > 1:
        stage = f"{run.pipeline_rank}_" if run.mesh.pipeline > 1 else ""
        return f"fp16_states_{stage}{run.data_rank % run.mesh.shard}.pt"
    return f"fp16_states_{_own_numbers(run)}.pt"


def _own_numbers(run: ScriptRun) -> str:
    return f"{run.pipeline_rank}_{run.tensor_rank}" + (f"_{run.data_rank}" if _shares_state(run) else "")
