"""Losses and gradients that are infinite, or no numbers: training went on with them, and ended with 0."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from stacks import Stack, start
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.errors import NonFiniteError
from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes

BAD_STEP = 2
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
LAYOUTS: list[dict[str, Any]] = [{}, {"data_parallel_degree": 2}, SHARDED]


def trainer(sw: Any, where: str) -> Any:
    """In the bad step `flag` is 0: the loss is NaN, or its gradient alone is."""

    @sw.step(loss_reduction="mean")
    def train(model: Any, x: Tensor, flag: Tensor) -> Tensor:
        y = model(x)
        loss = y.square().mean()
        if where == "loss":
            loss = loss / flag[0]
        else:
            loss = loss + ((y * 0).square().sum() + flag[0]).sqrt()
        model.backward(loss)
        return loss

    return train


def batch(number: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    return torch.randn(8, 5, 8, dtype=torch.float64), torch.full((8,), float(number != BAD_STEP)).double()


def train_until_bad(config: dict[str, Any], where: str, *, caught: bool = False) -> Any:
    sw, plain, model = start(Stack, config)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train = trainer(sw, where)
    for number in range(4):
        optimizer.zero_grad()
        try:
            train(model, *batch(number))
        except NonFiniteError:
            if not caught:
                raise
        optimizer.step()
        if number != BAD_STEP:
            theirs.zero_grad()
            for part in batch(number)[0].tensor_split(4):
                ((plain(part).square().mean() + float(where != "loss")) / 4).backward()
            theirs.step()
    return worst(plain, model)


def worst(plain: nn.Module, model: Any) -> float:
    state = model.state_dict()
    return max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    ("config", "where"),
    [(LAYOUTS[0], "loss"), (LAYOUTS[0], "gradient"), (LAYOUTS[1], "gradient"), (SHARDED, "loss")],
)
def test_a_step_that_is_not_finite_ends_the_run_on_all_ranks_alike(config, where):
    outcomes = run_ranks_outcomes(train_until_bad, 2, config, where, timeout_s=60)
    assert [outcome.error_type for outcome in outcomes] == ["NonFiniteError"] * 2
    text, other = (str(outcome.exception) for outcome in outcomes)
    assert text == other
    assert text.startswith("step 3: ")
    if where == "loss":
        assert "the loss is nan in microbatches 0, 1, 2, 3" in text or "the loss is inf" in text
    else:
        last = 1 if not config else 0
        assert f"(stage {last}) are not finite: head." in text
        assert "on_nonfinite 'skip'" in text


@pytest.mark.parametrize(
    ("config", "where"), [(LAYOUTS[0], "gradient"), (LAYOUTS[1], "loss"), (SHARDED, "loss")]
)
def test_an_update_is_left_out_and_the_others_are_those_of_a_plain_loop(config, where):
    for difference in run_ranks(train_until_bad, 2, {**config, "on_nonfinite": "skip"}, where):
        assert difference < 1e-10


def test_a_script_that_catches_the_error_goes_on():
    """Nothing is under way between ranks when it is raised, and `step` changes no weight."""
    for difference in run_ranks(train_until_bad, 2, {}, "gradient", caught=True):
        assert difference < 1e-10


def skipped_for_ever() -> int:
    sw, _, model = start(Stack, {"on_nonfinite": "skip"})
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    train = trainer(sw, "loss")
    for _ in range(100):
        optimizer.zero_grad()
        train(model, *batch(BAD_STEP))
        optimizer.step()
    return 0


def test_skipping_has_an_end():
    (outcome,) = run_ranks_outcomes(skipped_for_ever, 1)
    assert "So it was in 20 steps one after the other" in str(outcome.exception)
    # What was found is told once in a row: twenty times it was all that the console showed.
    assert outcome.stderr.count("is left out: the loss is inf") == 1
    assert outcome.stderr.count("is left out, as that of the step before (") == 19


def odd_gradients(case: str) -> Any:
    """What must not end a run."""
    sw, _, model = start(Stack, {"on_nonfinite": "stop"} | ({"fp16": True} if case == "fp16" else {}))
    if case == "unused parameters":
        model.module.blocks[0].register_parameter("spare", nn.Parameter(torch.full((2,), torch.nan)))
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120 if case == "scaler" else 2.0)

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean() * (1e25 if case == "large" else 1.0)
        model.backward(scaler.scale(loss) if case == "scaler" else loss)
        return loss

    @sw.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()

    dtype = torch.float32 if case == "large" else torch.float64
    if case == "large":
        model.module.float()
    for number in range(2):
        optimizer.zero_grad()
        x = batch(number)[0].to(dtype) * (1e140 if case == "scaler" else 1.0)
        train(model, x)
        if case == "scaler":
            scaler.step(optimizer)
            scaler.update()
        elif case != "large":
            optimizer.step()
    if case == "evaluation":
        with torch.no_grad():
            assert not evaluate(model, x * torch.nan).reduce_mean().isfinite()
    return all(bool(p.isfinite().all()) for n, p in model.local_named_parameters() if "spare" not in n)


@pytest.mark.parametrize("case", ["fp16", "scaler", "large", "evaluation", "unused parameters"])
def test_what_is_no_fault(case):
    """Overflow that a scaler takes care of, a norm too large for float32, an evaluation, NaN in weights."""
    assert run_ranks(odd_gradients, 2, case) == [True, True]


def scale_that_cannot_fall() -> None:
    sw.init({"run_dir": "off", "profile": "estimated", "microbatches": 4, "fp16": True})
    torch.manual_seed(0)
    model = sw.DistributedModel(Stack())
    optimizer = sw.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-2), dynamic_loss_args={"init_scale": 4.0}
    )
    train = trainer(sw, "loss")
    for _ in range(5):
        optimizer.zero_grad()
        train(model, *(each.float() for each in batch(BAD_STEP)))
        optimizer.step()


def test_a_loss_scale_that_falls_in_vain():
    """It halved for ever, and no update was made."""
    with pytest.raises(RanksFailedError, match=r"step 3: the loss is (inf|nan)"):
        run_ranks(scale_that_cannot_fall, 2)


def save_after_bad_step(folder: str) -> list[str]:
    sw, _, model = start(Stack, {"on_nonfinite": "ignore"})
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    checkpoints = sw.Checkpoints(folder, every=1, keep=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = checkpoints.resume()
    train = trainer(sw, "loss")
    for number in range(step, 4 if step == 0 else 0):
        optimizer.zero_grad()
        train(model, *batch(number))
        optimizer.step()
        checkpoints.step_done(number + 1)
    checkpoints.close()
    return [str(each.message) for each in caught]


def test_a_checkpoint_with_nan_takes_no_place_of_a_finite_one(tmp_path):
    """Once more steps were saved than are kept, every good checkpoint had been deleted."""
    folder = str(tmp_path / "checkpoints")
    run_ranks(save_after_bad_step, 2, folder)
    found = CheckpointFolder(Path(folder))
    assert [commit.step for commit in found.commits()] == [BAD_STEP, 4]
    assert len(found.open().not_finite) == 18
    said, nothing = run_ranks(save_after_bad_step, 2, folder)
    assert "has weights that are not finite (blocks.0.up.weight, " in said[0]
    assert 'checkpoints.resume("step-00000002") goes on from the newest before' in said[0]
    assert nothing == []
