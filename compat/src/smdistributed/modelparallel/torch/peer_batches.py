"""Batches of the ranks that share every layer of a stage.

::

    prescaled_batch False, as in the original's default: each rank reads its own, by dp_rank
        tp_rank 0    rows 0 1  ┐
        tp_rank 1    rows 2 3  ┴►  both work on rows 0 1 2 3
    prescaled_batch True: both read rows 0 1 2 3, by rdp_rank

What has no rows (a number, a tensor that is not cut) goes to all of them as the first one has it.
"""

import hashlib
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.joining.process_group import tell_all
from shardwright.errors import UsageError
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.splitter import is_batch_tensor
from smdistributed.modelparallel.torch.state_mod import current_run, state

_VALUES = (bool, int, float, complex, str, bytes, type(None))
_SHOWN = 60  # characters of a value


def with_batches_of_peers(batch: Batch) -> Batch:
    """The batches of all ranks of this tensor-parallel group, one behind the other."""
    run = current_run()
    if run.mesh.tensor == 1 or state.cfg.prescaled_batch:
        return batch
    group = run.groups.tensor
    assert group is not None
    _check_alike(batch, group)
    return batch.changed(
        lambda tensors: [torch.cat(_gathered(tensor, group), dim=axis) for tensor, axis in tensors]
    )


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    device = current_run().device
    own = tensor.detach().to(device).contiguous()
    if own.numel() == 0:
        return [own] * dist.get_world_size(group)
    # As bytes: not every backend knows every type.
    content = own.flatten().view(torch.uint8)
    parts = [torch.empty_like(content) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, content, group=group)
    return [part.view(own.dtype).view(own.shape) for part in parts]


def _check_alike(batch: Batch, group: dist.ProcessGroup) -> None:
    """Compares digests; descriptions travel where these differ."""
    mine = [[name, is_cut, *_described(leaf, is_cut)] for name, leaf, is_cut in batch.named_leaves()]
    digest = hashlib.sha256(repr(mine).encode()).digest()[:8]
    own = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=current_run().device)
    known = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(known, own, group=group)
    if all(torch.equal(each, own) for each in known):
        return
    first, *others = tell_all(mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    for number, other in enumerate(others, start=1):
        for here, there in zip_longest(first, other, fillvalue=None):
            if here != there:
                raise UsageError(_difference(here, there, ranks[0], ranks[number]))


def _described(leaf: Any, is_cut: bool) -> tuple[str, str]:
    """What must be the same on all ranks: words for it, and a digest of what they leave out."""
    if isinstance(leaf, np.ndarray):
        leaf, noun = torch.from_numpy(leaf), "an array"
    else:
        noun = "a tensor"
    if not is_batch_tensor(leaf) or leaf.layout is not torch.strided:
        text = repr(leaf) if isinstance(leaf, _VALUES) else type(leaf).__name__
        return text[:_SHOWN], hashlib.sha256(text.encode()).hexdigest()
    text = f"{noun} of shape {tuple(leaf.shape)} ({leaf.dtype})"
    if is_cut:
        return text, ""
    content = leaf.detach().cpu().contiguous().flatten()
    content = content.view(torch.uint8) if leaf.numel() else content
    return text, hashlib.sha256(content.numpy().tobytes()).hexdigest()


def _difference(here: Any, there: Any, first: int, second: int) -> str:
    name, is_cut, *_ = here or there
    shown = [each[2] if each else "not given" for each in (here, there)]
    shown[1] = f"is {shown[1]}" if shown[0] != shown[1] else "has other content"
    remedy = (
        "Leave out a small last batch (drop_last=True), or give all of them the same batch: prescaled_batch."
        if is_cut
        else "Only tensors that are cut into microbatches may differ: give all of them the same value, or "
        f"pass {name} as a tensor with a row for each sample."
    )
    return (
        f"{name} is {shown[0]} on rank {first} and {shown[1]} on rank {second}, and ranks of a "
        f"tensor-parallel group work on one batch. {remedy}"
    )
