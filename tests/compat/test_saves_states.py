"""States of model and optimizer: whole ones and parts, saved with one layout and loaded with others.

Partial checkpoints of sharded data parallelism: the whole model from their shards, without ranks.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from compat.saving import Net, Script, optimizer_of, plain
from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.testing import run_ranks
from smdistributed.modelparallel.torch.sharded_data_parallel_checkpoint import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint as whole_state,
)

ONE = {"partitions": 1}
TWO_STAGES = {"partitions": 2, "microbatches": 2}
OPTIMIZER_SHARED = {"partitions": 1, "shard_optimizer_state": True}
SHARED = {"partitions": 1, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}

LAYOUTS = {
    "one rank": (1, ONE),
    "two stages": (2, TWO_STAGES),
    "replicas share the optimizer's state": (2, OPTIMIZER_SHARED),
    "replicas share parameters": (2, SHARED),
}

# Before the first step of the run that loads, or after it: each layout in one of the two ways.
EACH = [(layout, number % 2 == 0) for number, layout in enumerate(LAYOUTS)]


def trained(settings: dict[str, Any], kind: str) -> Any:
    script = Script(settings, kind=kind)
    script.train(3)
    return script.model.state_dict(), script.optimizer.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_state_is_that_of_a_plain_model_and_its_optimizer(layout: str) -> None:
    """It loads into a plain module and a plain optimizer of all of its parameters, and is what they hold."""
    num_ranks, settings = LAYOUTS[layout]
    for state, optimizer_state in run_ranks(trained, num_ranks, settings, "AdamW"):
        model = Net().double()
        model.load_state_dict(state)
        optimizer = optimizer_of(model.parameters(), "AdamW", {"lr": 1.0})
        optimizer.load_state_dict(optimizer_state)
        names = dict(model.named_parameters())
        assert len(optimizer.state) == len(names) - 1  # one is not trained
        for name, parameter in names.items():
            if parameter.requires_grad:
                assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape, name
                assert optimizer.state[parameter]["step"] == 3
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.1]
        assert {group["lr"] for group in optimizer.param_groups} == {0.005}


def resumed(settings: dict[str, Any], kind: str, state: Any, *, early: bool) -> Any:
    script = Script(settings, kind=kind)
    if not early:
        script.train(1)
    result = script.model.load_state_dict(state[0])
    assert not result.missing_keys
    assert not result.unexpected_keys
    script.optimizer.load_state_dict(state[1])
    script.scheduler.load_state_dict(state[2])
    before = plain(script.optimizer.state_dict())
    losses = script.train(3, begin=3)
    return losses, before


def first_half(settings: dict[str, Any], kind: str) -> Any:
    script = Script(settings, kind=kind)
    script.train(3)
    state = (script.model.state_dict(), script.optimizer.state_dict())
    saved = torch.utils._pytree.tree_map(
        lambda value: value.clone() if isinstance(value, torch.Tensor) else value,
        (*state, script.scheduler.state_dict()),
    )
    return saved, script.train(3)


@pytest.mark.parametrize(("layout", "early"), EACH)
def test_training_goes_on_from_a_full_state(layout: str, early: bool) -> None:
    """Loaded before the first step or after it, the losses are the same to the last bit."""
    num_ranks, settings = LAYOUTS[layout]
    results = run_ranks(first_half, num_ranks, settings, "AdamW")
    state = results[0][0]
    for (_, expected), (found, before) in zip(
        results, run_ranks(resumed, num_ranks, settings, "AdamW", state, early=early), strict=True
    ):
        assert found == expected
        assert before["state"] == plain(state[1])["state"]


@pytest.mark.parametrize(
    ("source", "target"),
    [("two stages", "replicas share parameters"), ("replicas share parameters", "two stages")],
)
def test_a_full_state_goes_to_another_layout(source: str, target: str) -> None:
    num_ranks, settings = LAYOUTS[source]
    ((state, _), *_) = run_ranks(first_half, num_ranks, settings, "AdamW")
    num_ranks, settings = LAYOUTS[target]
    for _, before in run_ranks(resumed, num_ranks, settings, "AdamW", state, early=False):
        assert before["state"] == plain(state[1])["state"]


class Tied(Net):
    """With one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.second


def job(root: str, settings: dict[str, Any], dtype: Any) -> Any:
    """In the style of the public scripts, with names and shapes from helpers like theirs."""
    script = Script(settings, dtype=dtype, model=Tied())
    script.train(3)
    model, optimizer = script.model, script.optimizer
    names = {parameter: name for name, parameter in model.named_parameters()}
    script.smp.save_checkpoint(
        root,
        "own",
        model=model,
        optimizer=optimizer,
        user_content={
            "buffer_names": [f"module.{name}" for name, _ in model.get_module().named_buffers()],
            "param_shapes": [
                OrderedDict((names[p], getattr(p, "ds_shape", p.shape)) for p in group)
                for group in optimizer.fp16_groups
            ],
        },
    )
    script.smp.save_checkpoint(root, "ours", model=model, optimizer=optimizer)
    assert script.smp.resume_from_checkpoint(root, "ours") is None
    return model.state_dict()


@pytest.mark.parametrize(
    ("num_ranks", "settings", "dtype"),
    [
        (2, SHARED, torch.float64),
        (4, {**SHARED, "partitions": 2}, torch.float64),
        (3, {**SHARED, "sharded_data_parallel_degree": 3}, torch.float32),
    ],
)
def test_the_whole_model_from_its_shards(
    num_ranks: int, settings: dict[str, Any], dtype: Any, tmp_path: Path
) -> None:
    (state, *_) = run_ranks(job, num_ranks, str(tmp_path), settings, dtype)
    for tag in ("own", "ours", None):
        found = whole_state(tmp_path, tag, dtype=None)
        assert list(found) == list(state)
        for name, value in found.items():
            assert torch.equal(value.to(state[name].dtype), state[name]), name
    plain = Tied()
    plain.load_state_dict(whole_state(str(tmp_path)))
    assert all(v.dtype is torch.float32 for v in whole_state(tmp_path).values() if v.is_floating_point())


def public_helper(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """What tools that merge shards do with the files, told again from the description of their format."""
    model = torch.load(folder / "model_0.pt", map_location="cpu", weights_only=True)
    files = sorted(folder.glob("optimizer_*.pt"))
    shards = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    count = shards[0]["partition_count"]
    assert count == len(files)
    flats = [torch.cat(shard["fp32_flat_groups"], 0) for shard in shards]
    state = {k: v.float() for k, v in model["module"].items() if k in content["buffer_names"]}
    offset = 0
    for name, shape in {k: v for group in content["param_shapes"] for k, v in group.items()}.items():
        size = -(-shape.numel() // count)
        parts = [flat.narrow(0, offset, size) for flat in flats]
        state[name] = torch.cat(parts, 0).narrow(0, 0, shape.numel()).view(shape)
        offset += size
    assert offset * count == flats[0].numel() * count
    return state


def test_tools_that_merge_shards_find_what_they_need(tmp_path: Path) -> None:
    (state, *_) = run_ranks(
        job, 3, str(tmp_path), {**SHARED, "sharded_data_parallel_degree": 3}, torch.float32
    )
    for tag in ("own", "ours"):
        folder = tmp_path / f"{tag}_partial"
        content = torch.load(folder / "user_content.pt", weights_only=True)
        found = public_helper(folder, content)
        trained = {name for group in content["param_shapes"] for name in group}
        assert len(trained) == len(list(Net().parameters())) - 1
        assert found.keys() == trained | set(content["buffer_names"])
        for name, value in found.items():
            assert torch.equal(value, state[name.removeprefix("module.")].float()), name


def test_damage_and_what_is_no_such_checkpoint(tmp_path: Path) -> None:
    run_ranks(job, 2, str(tmp_path), SHARED, torch.float32)
    path = tmp_path / "own_partial" / "optimizer_1.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"own_partial/optimizer_1\.pt is damaged"):
        whole_state(tmp_path, "own")
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"optimizer_1\.pt is missing"):
        whole_state(tmp_path, "own")
    with pytest.raises(CheckpointError, match="has no partial checkpoint 'other'"):
        whole_state(tmp_path, "other")
    with pytest.raises(CheckpointError, match="there is no file newest"):
        whole_state(tmp_path / "own_partial")
