"""What one layout has saved, another one goes on from."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded import QUIET, Net, batches, loss_of, on_hosts, optimizer_of
from torch import Tensor

from choices import in_sweep
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.saved import add_tensors
from shardwright.checkpoint.tensor_index import INDEX, TensorIndex
from shardwright.testing import RanksFailedError, run_ranks

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4}
SHARDED = {"sharded_data_parallel_degree": 2}
SHARED_UPDATES = {"shard_optimizer_state": True}
LAYOUTS: tuple[tuple[dict[str, Any], int], ...] = (
    ({}, 1),
    ({**PIPELINE, **SHARDED}, 4),
    ({**SHARED_UPDATES, **SHARDED}, 4),
    ({**PIPELINE, **SHARED_UPDATES}, 4),
)


def training(settings: dict[str, Any], root: Path, *, loads: bool, blocks: int = 4):
    """Saves after two of three steps, or goes on from there; (losses of the rest, state of the model)."""
    on_hosts(4)
    import shardwright.torch as sw
    from shardwright.torch.checkpoints.own_loading import check_fits, load_model, load_optimizer_state

    sw.init({**QUIET, **settings})
    torch.manual_seed(7 if loads else 0)
    model = sw.DistributedModel(Net(blocks=blocks).double())
    updates = sw.DistributedOptimizer(optimizer_of("AdamW", model))

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        model.backward(loss)
        return loss

    def step(x: Tensor, y: Tensor) -> float:
        updates.zero_grad()
        loss = train(model, x.chunk(sw.dp_size())[sw.dp_rank()], y.chunk(sw.dp_size())[sw.dp_rank()])
        updates.step()
        mean = loss.reduce_mean().detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        return mean.item() / sw.size()

    first, second, *rest = batches(4)
    step(*first)
    if loads:
        saved = CheckpointFolder(root).open()
        check_fits(model, saved)
        load_model(model, saved)
        load_optimizer_state(model, updates, saved, others={})
    else:
        step(*second)
        save(root, model, updates)
    if dist.is_initialized():
        dist.barrier()
    return [step(*batch) for batch in rest], model.state_dict()


def save(root: Path, model: Any, updates: Any) -> None:
    """Saves the parts of all ranks; the first one commits."""
    import shardwright.torch as sw
    from shardwright.torch.checkpoints.own_parts import model_parts, optimizer_parts

    folder = CheckpointFolder(root)
    made: list[Any] = [str(folder.begin(2)) if sw.rank() == 0 else None]
    if sw.size() > 1:
        dist.broadcast_object_list(made)
    parts = [*model_parts(model), *optimizer_parts(model, updates)]
    name = f"rank-{sw.rank():05}.safetensors"
    own = (name, *add_tensors(Path(made[0]), name, parts, disk=Disk()))
    gathered: list[Any] = [own]
    if sw.size() > 1:
        gathered = [None] * sw.size()
        dist.all_gather_object(gathered, own)
    if sw.rank() == 0:
        index = TensorIndex.joined([entries for _, _, entries in gathered])
        files = {name: file for name, file, _ in gathered}
        files[INDEX] = Disk().write(Path(made[0]) / INDEX, [index.to_bytes()])
        folder.commit(Path(made[0]), step=2, files=files)
        folder.open().check()


@pytest.mark.parametrize(
    ("before", "ranks"),
    [LAYOUTS[0], *(in_sweep(*each) for each in LAYOUTS[1:])],
    ids=lambda v: "+".join(v) if isinstance(v, dict) else v,
)
def test_a_layout_goes_on_from_itself_and_another(tmp_path, before, ranks):
    losses, state = run_ranks(training, ranks, before, tmp_path, loads=False)[0]
    place = LAYOUTS.index((before, ranks))
    for after, others in (LAYOUTS[place], LAYOUTS[place - 1]):  # sw.Checkpoints goes through all of them
        for found, own_state in run_ranks(training, others, after, tmp_path, loads=True):
            assert found == pytest.approx(losses, rel=1e-10)
            for name, value in state.items():
                torch.testing.assert_close(own_state[name], value, rtol=1e-9, atol=1e-11)
            if after == before:
                assert found == losses  # to the last bit
                assert all(torch.equal(own_state[name], value) for name, value in state.items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run_ranks(training, 1, {}, tmp_path, loads=False)
    with pytest.raises(RanksFailedError, match=r"only in the checkpoint: blocks\.3\.down\.bias"):
        run_ranks(training, 1, {}, tmp_path, loads=True, blocks=3)
    with pytest.raises(RanksFailedError, match=r"only in the model: blocks\.4\.down\.bias"):
        run_ranks(training, 1, {}, tmp_path, loads=True, blocks=5)
