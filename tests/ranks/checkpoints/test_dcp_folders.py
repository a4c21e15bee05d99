"""A run moves from FSDP2 to us and back, by folders of `torch.distributed.checkpoint`, to the last bit."""

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded import QUIET, VOCABULARY
from torch import Tensor, nn

from choices import in_sweep
from shardwright.cli import main
from shardwright.testing import RanksFailedError, run_ranks


class Language(nn.Module):
    """Has a buffer, rows that two ranks cannot share equally, and weights that no stage has alone."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 15), nn.Linear(15, 8)) for _ in range(4)))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)) * self.scale)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "lr": 2e-2, "weight_decay": 0.0},
    ]


def _batch(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (8, 4), generator=torch.Generator().manual_seed(step))


def fsdp2(
    steps: range, *, dtype: torch.dtype, flat: bool, save: Path | None = None, load: Path | None = None
) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses of FSDP2's own training, and the whole state of model and optimizer at the begin or the end."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")  # linear layers return views
    torch.manual_seed(3)
    model = Language().to(dtype)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(_groups(model))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer, options=options)
        more = {"train_state": {"step": steps.stop, "ntokens_seen": 0}} if flat else {}
        return {**weights, **more, "optimizer": moments} if flat else {"model": weights, "optimizer": moments}

    if load is not None:
        found = state()
        dcp.load(found, checkpoint_id=load)
        moments = found.pop("optimizer")
        found.pop("train_state", None)
        weights = found if flat else found["model"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    first = deepcopy(get_state_dict(model, optimizer, options=whole)) if load else ({}, {})
    losses = []
    for step in steps:
        x = _batch(step).chunk(2)[dist.get_rank()]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 2)
    if save is not None:
        dcp.save(state(), checkpoint_id=save)
    weights, moments = first if load else get_state_dict(model, optimizer, options=whole)
    return losses, dict(weights), dict(moments)


def ours(settings: dict[str, Any], folder: Path, *, dtype: torch.dtype, updates: int = 0) -> list[float]:
    """Losses of a run that goes on there; without updates, it saves what it has resumed from."""
    import shardwright.torch as sw

    sw.init({**QUIET, **settings})
    torch.manual_seed(1)
    model = sw.DistributedModel(Language().to(dtype))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(_groups(model)))
    checkpoints = sw.Checkpoints(folder, keep=None)
    step = checkpoints.resume()
    assert step == 3

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        model.backward(loss)
        return loss

    losses = []
    for number in range(step, step + max(updates, 1)):
        x = _batch(number).chunk(sw.rdp_size())[sw.rdp_rank()]
        optimizer.zero_grad()
        loss = train(model, x).reduce_mean().detach().clone()
        if updates:
            optimizer.step()
        if sw.rdp_size() > 1:
            torch.distributed.all_reduce(loss)
            loss /= sw.size()
        losses.append(loss.item())
    if not updates:
        checkpoints.save(step + 1)
    checkpoints.close()
    return losses


def _ckpt(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", *map(str, words)])
    assert not ended.value.code


def _equal(found: Any, expected: Any, name: str = "") -> None:
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            _equal(found[key], value, f"{name}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), name
        for number, value in enumerate(expected):
            _equal(found[number], value, f"{name}.{number}")
    else:
        assert found == expected, name


PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
SHARDS = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": PIPELINE,
    "shards": SHARDS,
    "tensor": {"tensor_parallel_degree": 2},
    "shared updates": {"pipeline_parallel_degree": 1, "shard_optimizer_state": True},
    "bf16": {**PIPELINE, "bf16": True},
    "bf16 shards": {**SHARDS, "bf16": True},
}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *(("pipeline", "dcp"), ("shards", "torchtitan"), in_sweep("tensor", "dcp")),
        *(in_sweep("shared updates", "dcp"), ("bf16 shards", "dcp"), in_sweep("bf16", "torchtitan")),
    ],
)
def test_a_run_moves_from_fsdp2_to_us_and_back(layout: str, kind: str, tmp_path: Path) -> None:
    """Weights, moments, step counts and options of the groups are the same bits at the end of the way.

    Under ``bf16``, the float32 weights of FSDP2 are the master copies here; buffers are rounded.
    """
    dtype = torch.float32 if "bf16" in layout else torch.float64
    flat = kind == "torchtitan"
    theirs = run_ranks(fsdp2, 2, range(3), dtype=dtype, flat=flat, save=tmp_path / "there")
    on = run_ranks(fsdp2, 2, range(3, 5), dtype=dtype, flat=flat, load=tmp_path / "there")
    _ckpt("import", tmp_path / "there", "-o", tmp_path / "run")
    losses = run_ranks(ours, 2, LAYOUTS[layout], tmp_path / "run", dtype=dtype)[0]
    tolerance = 2e-2 if "bf16" in layout else 1e-12
    assert losses[0] == pytest.approx(on[0][0][0], rel=tolerance)
    _ckpt("export", tmp_path / "run", "--name", "step-00000004", "-o", tmp_path / "back", "--format", kind)
    back = run_ranks(fsdp2, 2, range(3, 5), dtype=dtype, flat=flat, load=tmp_path / "back")
    _, weights, moments = theirs[0]
    assert {float(each["step"]) for each in moments["state"].values()} == {3.0}
    if "bf16" in layout:
        assert torch.equal(back[0][1].pop("scale"), weights.pop("scale").bfloat16().float())
    _equal(back[0][1], weights)
    _equal(back[0][2], moments)
    assert "bf16" in layout or back[0][0] == on[0][0]


@pytest.mark.parametrize("layout", [in_sweep("pipeline"), in_sweep("shards"), "tensor"])
def test_training_goes_on_as_fsdp2_would(layout: str, tmp_path: Path) -> None:
    run_ranks(fsdp2, 2, range(3), dtype=torch.float64, flat=False, save=tmp_path / "there")
    on = run_ranks(fsdp2, 2, range(3, 6), dtype=torch.float64, flat=False, load=tmp_path / "there")
    _ckpt("import", tmp_path / "there", "-o", tmp_path / "run")
    losses = run_ranks(ours, 2, LAYOUTS[layout], tmp_path / "run", dtype=torch.float64, updates=3)[0]
    assert losses == pytest.approx(on[0][0], rel=1e-9)


def _with_scheduler(folder: Path) -> tuple[int, int, list[float]]:
    import shardwright.torch as sw

    sw.init(QUIET)
    model = sw.DistributedModel(Language().double())
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(_groups(model)))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    own = torch.optim.lr_scheduler.StepLR(optimizer, 7)  # nothing of that name was saved
    step = sw.Checkpoints(folder, state={"scheduler": scheduler, "own": own}).resume()
    assert own.last_epoch == 0
    return step, scheduler.last_epoch, [group["lr"] for group in optimizer.param_groups]


def test_states_of_the_same_name_are_taken(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = Language().double()
    optimizer = torch.optim.AdamW(_groups(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    weights, moments = get_state_dict(model, optimizer)
    with warnings.catch_warnings(action="ignore"):
        for _ in range(5):
            scheduler.step()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": 5}
        dcp.save(state, checkpoint_id=tmp_path / "there", no_dist=True)
    _ckpt("import", tmp_path / "there", "-o", tmp_path / "run")
    rates = [group["lr"] for group in optimizer.param_groups]
    assert run_ranks(_with_scheduler, 1, tmp_path / "run") == [(5, 5, rates)]


def _another_optimizer(folder: Path, kind: str, wrap: bool) -> None:
    import shardwright.torch as sw

    sw.init(QUIET)
    model = sw.DistributedModel(Language().double())
    if wrap:
        sw.DistributedOptimizer(
            getattr(torch.optim, kind)(_groups(model)[:1] if kind == "AdamW" else _groups(model))
        )
    sw.Checkpoints(folder).resume()


@pytest.mark.parametrize(
    ("kind", "wrap", "says"),
    [
        ("SGD", True, r"has an optimizer with .*betas.* \(SGD\) has .*momentum.* instead"),
        ("AdamW", True, "has an optimizer with 2 parameter groups, and here it has 1"),
        ("AdamW", False, "has 1 optimizers, and this run has 0"),
    ],
)
def test_another_optimizer_is_refused(kind: str, wrap: bool, says: str, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = Language().double()
    weights, moments = get_state_dict(model, torch.optim.AdamW(_groups(model)))
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "there", no_dist=True)
    _ckpt("import", tmp_path / "there", "-o", tmp_path / "run")
    with pytest.raises(RanksFailedError, match=says):
        run_ranks(_another_optimizer, 1, tmp_path / "run", kind, wrap)
