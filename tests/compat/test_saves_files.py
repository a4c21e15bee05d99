"""``smp.save`` and ``smp.load``; partition files; calls on some of the ranks that must make them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from choices import in_sweep
from compat.saving import QUIET, Script, plain
from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes

TWO_STAGES = {"partitions": 2, "microbatches": 2}
OPTIMIZER_SHARED = {"partitions": 1, "shard_optimizer_state": True}


def fails(job: Any, num_ranks: int = 2) -> str:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(job, num_ranks)
    return str(caught.value)


# ---- smp.save and smp.load ----


def test_each_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    """In the style of scripts before 1.10, which save one dictionary with everything."""
    file = str(tmp_path / "checkpoints" / "model.pt")

    def saves() -> Any:
        script = Script(TWO_STAGES)
        script.train(3)
        smp = script.smp
        content = {
            "model": script.model.local_state_dict(),
            "optimizer": script.optimizer.save_optimizer_backcompat(gather_if_shard=True),
            "lr_scheduler": script.scheduler.state_dict(),
            "total_steps": 3,
        }
        if smp.rdp_rank() == 0:
            smp.save(content, file, partial=True)
        if smp.rank() == 0:
            smp.save(script.model.get_module().training, file, partial=False)
        return script.train(2)

    expected = run_ranks(saves, 4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "model.pt",
        "model.pt_0_0",
        "model.pt_1_0",
    ]

    def loads() -> Any:
        script = Script(TWO_STAGES)
        smp = script.smp
        checkpoint = smp.load(file, partial=True, back_compat=True)
        script.model.load_state_dict(checkpoint["model"], same_partition_load=True)
        script.optimizer.load_optimizer_backcompat(checkpoint["optimizer"], gather_if_shard=True)
        script.scheduler.load_state_dict(checkpoint["lr_scheduler"])
        assert smp.load(file, partial=False) is True
        return script.train(2, begin=3)

    assert run_ranks(loads, 4) == expected


def test_replicas_with_parts_of_their_own(tmp_path: Path) -> None:
    """As the Trainer of transformers 4.28: v3 names, and the state comes back after the first step."""
    file = str(tmp_path / "optimizer.pt")

    def saves() -> Any:
        script = Script(OPTIMIZER_SHARED)
        script.train(3)
        smp = script.smp
        state = script.optimizer.local_state_dict(gather_if_shard=False)
        smp.barrier()
        smp.save(state, file, partial=True, v3=smp.state.cfg.shard_optimizer_state)
        whole = script.optimizer.local_state_dict(gather_if_shard=True)
        if smp.rdp_rank() == 0:
            smp.save(whole, str(tmp_path / "gathered.pt"), partial=True)
        return plain(script.optimizer.state_dict())

    (expected, _) = run_ranks(saves, 2)
    assert {path.name for path in tmp_path.iterdir()} == {
        "optimizer.pt_0_0_0",
        "optimizer.pt_0_0_1",
        "gathered.pt_0_0",
    }

    def loads(name: str) -> Any:
        script = Script(OPTIMIZER_SHARED)
        smp = script.smp

        def hook(model: Any, optimizer: Any) -> None:
            optimizer.load_state_dict(smp.load(str(tmp_path / name), partial=True))

        script.model.register_post_step_hook(hook)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        script.step(script.model, x, torch.zeros(8, dtype=torch.long))
        return plain(script.optimizer.state_dict())

    for name in ("optimizer.pt", "gathered.pt"):
        for found in run_ranks(loads, 2, name):
            assert found["state"] == expected["state"]


def test_what_cannot_be_loaded_or_saved(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"

    def one(call: str, *args: Any, **options: Any) -> Any:
        def job() -> None:
            smp = Script({"partitions": 1}).smp
            getattr(smp, call)(*args, **options)

        return fails(job, 1)

    assert "there is no file for rank 0 (pipeline rank 0): model.pt_0_0 or" in one("load", str(file))
    assert f"{file} is not there, or is no file" in one("load", str(file), partial=False)
    torch.save(1, tmp_path / "model.pt_0_0")
    assert "model.pt_0_0 is: it was saved with partial=True" in one("load", str(file), partial=False)
    torch.save(1, tmp_path / "model.pt_1_0")
    assert "was saved by 2 partitions, and there are 1 now" in one("load", str(file))
    torch.save(1, tmp_path / "full.pt")
    assert "partial=False loads it" in one("load", str(tmp_path / "full.pt"))
    assert "takes the name of a file" in one("save", 1, 3)
    assert "cannot be pickled or copied" in fails(
        lambda: (s := Script({"partitions": 1})).smp.save(s.model, str(tmp_path / "whole")), 1
    )
    assert not list(tmp_path.glob("whole*"))


# ---- partition files ----


def stores(file: str) -> Any:
    script = Script({**TWO_STAGES, "partition_file": file})
    losses = script.train(2)
    script.smp.barrier()
    return losses


def test_a_partition_file_that_contradicts_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "partition.json"
    run_ranks(stores, 2, str(file))
    given = {**QUIET, "ddp": True, "load_partition": True, "partition_file": str(file)}

    def begin(settings: dict[str, Any]) -> Any:
        def job() -> None:
            import smdistributed.modelparallel.torch as smp

            smp.init(settings)

        return fails(job)

    text = begin({**given, "partitions": 1, "microbatches": 4})
    assert f"partition_file {file} contradicts the settings" in text
    assert "partitions is 2 in the file, and 1 in the settings" in text
    assert "microbatches is 2 in the file, and 4 in the settings" in text
    missing = str(tmp_path / "none")
    text = begin({**given, **TWO_STAGES, "partition_file": missing})
    assert f"ConfigError: partition_file {missing} cannot be read: No such file or directory. A run" in text
    text = begin({**QUIET, **TWO_STAGES, "load_partition": True})
    assert "load_partition is True, but partition_file is not set" in text
    file.write_text(file.read_text()[:100])
    assert "is no JSON" in begin({**given, **TWO_STAGES})


# ---- ranks that never come ----


def some_ranks(call: str, root: str) -> Any:
    """The first rank alone makes a call; the other one goes on to the next step."""
    script = Script({**TWO_STAGES, "shared_memory": False})
    script.train(1)
    smp, model, optimizer = script.smp, script.model, script.optimizer
    calls = {
        "optimizer.state_dict()": optimizer.state_dict,
        "smp.save('a', partial=True)": lambda: smp.save(1, f"{root}/a"),
        "smp.save_checkpoint()": lambda: smp.save_checkpoint(root, "a", model=model),
    }
    if smp.rank() == 0:
        calls[call]()
    else:
        script.train(1)


@pytest.mark.parametrize(
    "call",
    [in_sweep("optimizer.state_dict()"), in_sweep("smp.save('a', partial=True)"), "smp.save_checkpoint()"],
)
def test_a_call_on_some_ranks_names_the_missing_ones(call: str, tmp_path: Path) -> None:
    first, second = run_ranks_outcomes(some_ranks, 2, call, str(tmp_path), timeout_s=50)
    assert f"{call} is to be called by all of ranks 0, 1. Rank 1 has not come" in first.cause
    assert "rank 1 is in the step function" in first.cause
    assert "Call it on all of them, in the same order" in first.cause
    assert first.seconds < 15
    assert "rank 0 failed first (UsageError" in second.cause
