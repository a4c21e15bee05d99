"""What ranks save makes up the whole model and the whole state of the optimizer, each element once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded import QUIET, Net, batches, loss_of, on_hosts, optimizer_of
from torch import Tensor

from choices import in_sweep
from shardwright.checkpoint.tensor_index import Piece, TensorEntry, TensorIndex
from shardwright.testing import run_ranks

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4}
SHARDED = {"sharded_data_parallel_degree": 2}
SHARED_UPDATES = {"shard_optimizer_state": True}


def parts_after_training(settings: dict[str, Any], ranks_per_host: int, dtype: torch.dtype):
    """(own parts of the model, of the optimizer, state of the model) of a rank after two steps."""
    on_hosts(ranks_per_host)
    import shardwright.torch as sw
    from shardwright.torch.checkpoints.own_parts import model_parts, optimizer_parts
    from shardwright.torch.checkpoints.state_dict_files import tensor_of

    sw.init({**QUIET, **settings})
    torch.manual_seed(0)
    net = Net()
    net.register_buffer("kept", torch.arange(3.0))
    net.register_buffer("passing", torch.arange(3.0), persistent=False)
    model = sw.DistributedModel(net.to(dtype))
    updates = sw.DistributedOptimizer(optimizer_of("AdamW", model))

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        model.backward(loss)
        return loss

    for x, y in batches(2):
        updates.zero_grad()
        train(model, x.chunk(sw.dp_size())[sw.dp_rank()], y.chunk(sw.dp_size())[sw.dp_rank()])
        updates.step()

    def plain(parts: Any) -> list[Any]:
        return [(part.name, tensor_of(part.stored).clone(), part.whole, part.box) for part in parts]

    found = plain(model_parts(model)), plain(optimizer_parts(model, updates)), model.state_dict()
    dist.barrier()
    return found


def plain_parts() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State of the model, and of the optimizer by parameter and key, of one process."""
    torch.manual_seed(0)
    model = Net().double()
    updates = optimizer_of("AdamW", model)
    for x, y in batches(2):
        updates.zero_grad()
        loss_of(model, x, y).backward()
        updates.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    of_optimizer = {
        f"{names[p]}/{key}": v for p, values in updates.state.items() for key, v in values.items()
    }
    return dict(model.state_dict()), of_optimizer


def joined(of_ranks: list[list[Any]]) -> dict[str, Tensor]:
    """Whole tensors from the parts of all ranks; fails where they overlap or leave gaps."""
    entries = []
    for parts in of_ranks:
        own: dict[str, TensorEntry] = {}
        for name, tensor, whole, box in parts:
            piece = Piece(file="f", key="k", offset=box.offset, shape=box.shape)
            pieces = (*(own[name].pieces if name in own else ()), piece)
            own[name] = TensorEntry(dtype=str(tensor.dtype), shape=whole, pieces=pieces)
        entries.append(own)
    index = TensorIndex.joined(entries)
    found = {}
    for parts in of_ranks:
        for name, tensor, whole, box in parts:
            target = found.setdefault(name, torch.full(whole, torch.nan, dtype=tensor.dtype))
            target[box.slices] = tensor
    assert set(found) == set(index.tensors)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "ranks", "ranks_per_host"),
    [
        ({}, 1, 4),
        in_sweep(PIPELINE, 4, 4),
        in_sweep(SHARDED, 4, 4),
        in_sweep({"sharded_data_parallel_degree": 4}, 4, 1),
        (SHARED_UPDATES, 2, 4),
        in_sweep({**SHARED_UPDATES, **SHARDED}, 4, 4),
        ({**SHARED_UPDATES, **SHARDED}, 4, 1),
        ({**PIPELINE, **SHARDED}, 4, 4),
        in_sweep({**PIPELINE, **SHARED_UPDATES}, 4, 4),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, dict) else str(value),
)
def test_every_element_once(settings, ranks, ranks_per_host):
    found = run_ranks(parts_after_training, ranks, settings, ranks_per_host, torch.float64)
    model, optimizer = plain_parts()
    of_model = joined([parts for parts, _, _ in found])
    assert set(of_model) == {f"model/{name}" for name in (*model, "kept")}
    for name, value in found[0][2].items():
        torch.testing.assert_close(of_model[f"model/{name}"], value, rtol=0, atol=0)
    for name, value in model.items():
        torch.testing.assert_close(of_model[f"model/{name}"], value, rtol=1e-10, atol=1e-12)
    of_optimizer = joined([parts for _, parts, _ in found])
    assert set(of_optimizer) == {f"optimizer/{name}" for name in optimizer}
    for name, value in optimizer.items():
        torch.testing.assert_close(of_optimizer[f"optimizer/{name}"], value, rtol=1e-10, atol=1e-12)
    if ranks == 4 and settings == SHARDED:  # the replicas share the work
        sizes = [sum(tensor.numel() for _, tensor, _, _ in parts) for parts, _, _ in found]
        assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize(
    "settings", [in_sweep({}), in_sweep(SHARDED), in_sweep(SHARED_UPDATES), {**SHARED_UPDATES, **SHARDED}]
)
def test_copies_in_32_bits_are_saved(settings):
    found = run_ranks(parts_after_training, 4, {**settings, "bf16": True}, 4, torch.float32)
    of_model = joined([parts for parts, _, _ in found])
    of_optimizer = joined([parts for _, parts, _ in found])
    weight = of_model["model/blocks.0.up.weight"]
    master = of_optimizer["optimizer/blocks.0.up.weight/#master"]
    assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(master.bfloat16(), weight, rtol=0, atol=0)
