"""Writing down what a model has become, and comparing it with what another run wrote down."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import CheckpointError
from smdistributed.modelparallel.torch.pickles.files import load_file
from smdistributed.modelparallel.torch.state_mod import current_run


def dump_model(model: nn.Module, path: str | os.PathLike[str] = "model_dump.pt", **more: Any) -> None:
    """Writes the whole state of a model to a file; collective over all ranks, the first one writes."""
    found = {"model": dict(model.state_dict()), **more}
    if current_run().rank == 0:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, target)


def verify(
    model: nn.Module,
    path: str | os.PathLike[str] = "model_dump.pt",
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    **more: Any,
) -> None:
    """Compares the whole state of a model with what `dump_model` wrote; collective over all ranks."""
    now = {**model.state_dict(), **more}
    if not Path(path).is_file():
        raise CheckpointError(f"there is no {path} to compare the model with. Write it with dump_model.")
    written: Mapping[str, Any] = load_file(path, "cpu")
    then = {**written["model"], **{name: written[name] for name in more if name in written}}
    if then.keys() != now.keys():
        names = ", ".join(sorted(then.keys() ^ now.keys())[:5])
        raise CheckpointError(f"{path} and the model have other names: {names}. Compare runs of one model.")
    different = [name for name in then if not _close(then[name], now[name], rtol=rtol, atol=atol)]
    if different:
        raise CheckpointError(
            f"{len(different)} of {len(then)} tensors differ from {path} by more than rtol {rtol:g}, atol "
            f"{atol:g}: {', '.join(different[:5])}."
        )


def _close(then: Any, now: Any, *, rtol: float, atol: float) -> bool:
    if not isinstance(then, Tensor) or not isinstance(now, Tensor):
        return bool(then == now)
    if then.shape != now.shape:
        return False
    return torch.allclose(then.double(), now.detach().cpu().double(), rtol=rtol, atol=atol)
