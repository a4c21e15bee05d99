"""``smp.save_checkpoint`` and ``resume_from_checkpoint`` in all layouts, and the files that they leave."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compat.saving import Net, Script, plain
from shardwright.plan import Plan
from shardwright.run.context import context
from shardwright.testing import RanksFailedError, run_ranks

TWO_STAGES = {"partitions": 2, "microbatches": 2}
SHARED = {"partitions": 1, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
LAYOUTS: dict[str, tuple[int, dict[str, Any], torch.dtype]] = {
    "one rank": (1, {"partitions": 1}, torch.float64),
    "two stages": (2, TWO_STAGES, torch.float64),
    "replicas share the optimizer's state": (
        2,
        {"partitions": 1, "shard_optimizer_state": True},
        torch.float64,
    ),
    "replicas share parameters": (2, SHARED, torch.float64),
    "two stages of replicas that share parameters": (4, {**SHARED, "partitions": 2}, torch.float64),
    "some parameters are shared": (2, {**SHARED, "sdp_param_persistence_threshold": 60}, torch.float32),
    "float16": (2, {**TWO_STAGES, "fp16": True}, torch.float16),
    "bfloat16 that is shared": (2, {**SHARED, "bf16": True}, torch.bfloat16),
}
FILES = {
    "one rank": "model_0_0 optimizer_0_0",
    "two stages": "model_0_0 model_1_0 optimizer_0_0 optimizer_1_0",
    "replicas share the optimizer's state": "model_0_0 optimizer_0_0_0 optimizer_0_0_1",
    "replicas share parameters": "model_0 optimizer_0 optimizer_1",
    "two stages of replicas that share parameters": (
        "model_0 model_1 optimizer_0_0 optimizer_0_1 optimizer_1_0 optimizer_1_1"
    ),
    "some parameters are shared": "model_0 optimizer_0 optimizer_1",
    "float16": ("model_0_0 model_1_0 optimizer_0_0 optimizer_1_0 fp16_states_0_0 fp16_states_1_0"),
    "bfloat16 that is shared": "model_0 optimizer_0 optimizer_1",
}
CONTENT = {"total_steps": 3, "cli_args": {"lr": 0.1}, "start_train_path_index": 0}


def saves(settings: Any, dtype: Any, root: str, *, partial: bool = True) -> Any:
    script = Script(settings, dtype=dtype)
    script.train(3)
    content = {**CONTENT, "lr_scheduler": script.scheduler.state_dict()}
    script.smp.save_checkpoint(
        root, "step3", partial=partial, model=script.model, optimizer=script.optimizer, user_content=content
    )
    return script.train(3), script.smp.pp_rank(), len(list(script.model.local_parameters()))


def resumes(settings: Any, dtype: Any, root: str, *, early: bool = True, **options: Any) -> Any:
    script = Script(settings, dtype=dtype)
    if not early:
        script.train(1)
    content = script.smp.resume_from_checkpoint(root, **options)
    if "lr_scheduler" in (content or {}):
        script.scheduler.load_state_dict(content.pop("lr_scheduler"))
    losses = script.train(3, begin=3)
    return losses, content, len(list(script.model.local_parameters()))


@pytest.mark.parametrize("layout", LAYOUTS.keys() - {"replicas share parameters"})
def test_a_partial_checkpoint_goes_on_to_the_last_bit(layout: str, tmp_path: Path) -> None:
    """The losses after resuming are those of the run that went on, on every rank."""
    num_ranks, settings, dtype = LAYOUTS[layout]
    saved = run_ranks(saves, num_ranks, settings, dtype, str(tmp_path))
    folder = tmp_path / "step3_partial"
    names = {path.name for path in folder.iterdir()}
    wanted = {f"{name}.pt" for name in FILES[layout].split()} | {"user_content.pt", "manifest.json"}
    assert names == wanted | ({"partition.json"} if settings["partitions"] == 2 else set())
    assert (tmp_path / "newest").read_text().strip() == "step3"
    for path in folder.glob("fp16_states_*"):
        found = torch.load(path, weights_only=True)
        assert found["loss_scaler"]["dynamic"] is False
        assert {master.dtype for master in found["fp32_master_params"].values()} == {torch.float32}
    # Before the first step of the run that resumes, or after it.
    for early in (True, False) if layout == "two stages" else (list(LAYOUTS).index(layout) % 2 == 0,):
        resumed = run_ranks(resumes, num_ranks, settings, dtype, str(tmp_path), early=early)
        assert [losses for losses, _, _ in resumed] == [losses for losses, _, _ in saved]
        assert all(content == CONTENT for _, content, _ in resumed)


def test_the_partition_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """Also where this run would have made another one."""
    run_ranks(saves, 2, {**TWO_STAGES, "auto_partition": True}, torch.float64, str(tmp_path))
    stored = Plan.read(tmp_path / "step3_partial" / "partition.json")
    moved = json.loads(stored.to_json())
    first, second = moved["stages"]
    second["units"] = first["units"][1:] + second["units"]
    first["units"] = first["units"][:1]
    moved["prediction"] = None

    def job() -> Any:
        script = Script(TWO_STAGES)
        script.smp.resume_from_checkpoint(str(tmp_path))
        script.train(1)
        plan = context().plan
        assert plan is not None
        return [stage.units for stage in plan.stages]

    assert run_ranks(job, 2)[0] == [stage.units for stage in stored.stages]
    file = tmp_path / "moved.json"
    file.write_text(json.dumps(moved))
    other = {**TWO_STAGES, "load_partition": True, "partition_file": str(file)}
    saved = run_ranks(saves, 2, other, torch.float64, str(tmp_path / "other"))
    # A run that was partitioned otherwise before it resumes: parts go from rank to rank.
    resumed = run_ranks(resumes, 2, TWO_STAGES, torch.float64, str(tmp_path / "other"), early=False)
    assert resumed[0][2] != saved[0][2]
    for (found, _, _), (expected, _, _) in zip(resumed, saved, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["one rank", "replicas share parameters"])
def test_a_full_checkpoint_is_a_file_of_a_plain_model(layout: str, tmp_path: Path) -> None:
    num_ranks, settings, dtype = LAYOUTS[layout]
    run_ranks(saves, num_ranks, settings, dtype, str(tmp_path), partial=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest_step3.json",
        "newest",
        "step3",
        "user_content_step3",
    ]
    model = Net().double()
    model.load_state_dict(torch.load(tmp_path / "step3", weights_only=True))
    ((_, content, _),) = run_ranks(
        resumes, 1, {"partitions": 1}, torch.float64, str(tmp_path), partial=False, tag="step3"
    )
    assert content == CONTENT


def test_a_full_file_that_plain_torch_has_saved(tmp_path: Path) -> None:
    """As transformers 4.28 has it: a state, an empty user_content.pt, and no tag."""
    state = {f"module.{name}": value for name, value in Net().double().state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "user_content.pt").touch()

    def job() -> Any:
        script = Script(TWO_STAGES)
        with torch.no_grad():
            for parameter in script.model.parameters():
                parameter.zero_()
        content = script.smp.resume_from_checkpoint(
            path=str(tmp_path), tag="pytorch_model.bin", partial=False, load_optimizer=False
        )
        assert content is None
        script.train(1)
        return None

    run_ranks(job, 2)

    def loads() -> Any:
        script = Script(TWO_STAGES)
        script.smp.resume_from_checkpoint(str(tmp_path), "pytorch_model.bin", partial=False)
        return plain(script.model.state_dict())

    assert run_ranks(loads, 2)[0] == plain(Net().double().state_dict())


def test_old_ones_are_removed_when_the_new_one_is_there(tmp_path: Path) -> None:
    (tmp_path / "of_others_partial").mkdir()
    (tmp_path / "step9_partial.tmp-12345678").mkdir()

    def job() -> Any:
        script = Script(TWO_STAGES)
        script.train(1)
        for number in range(5):
            script.smp.save_checkpoint(
                str(tmp_path), f"step{number}", model=script.model, num_kept_partial_checkpoints=2
            )
        script.smp.save_checkpoint(str(tmp_path), "step4", model=script.model)  # once more

    run_ranks(job, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "newest",
        "of_others_partial",
        "step3_partial",
        "step4_partial",
    ]


def fails(job: Any, num_ranks: int = 2, *args: Any) -> str:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(job, num_ranks, *args)
    return str(caught.value)


def test_another_layout_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run_ranks(saves, 2, TWO_STAGES, torch.float64, str(tmp_path))
    text = fails(resumes, 1, {"partitions": 1}, torch.float64, str(tmp_path))
    assert "ranks: 2 there, 1 here; partitions: 2 there, 1 here" in text
    assert "partial=False" in text
    text = fails(resumes, 2, {"partitions": 1}, torch.float64, str(tmp_path))
    assert "(partitions: 2 there, 1 here)" in text
    text = fails(resumes, 4, TWO_STAGES, torch.float64, str(tmp_path))
    assert "(ranks: 2 there, 4 here)" in text


def test_a_model_in_another_type_is_refused_with_the_checkpoint(tmp_path: Path) -> None:
    run_ranks(saves, 2, TWO_STAGES, torch.float64, str(tmp_path))
    text = fails(resumes, 2, TWO_STAGES, torch.float32, str(tmp_path))
    assert "_partial cannot be loaded, because its partition does not fit: the plan was made for" in text
    assert "in the same dtype" in text
    assert "Make the plan anew" not in text.split("StalePlanError")[-1]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    run_ranks(saves, 2, TWO_STAGES, torch.float64, str(tmp_path))
    flipped, linked = (tmp_path / "step3_partial" / name for name in ("model_1_0.pt", "model_0_0.pt"))
    whole = flipped.read_bytes()
    content = bytearray(whole)
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    said = [fails(resumes, 2, TWO_STAGES, torch.float64, str(tmp_path))]
    flipped.write_bytes(whole)
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    said.append(fails(resumes, 2, TWO_STAGES, torch.float64, str(tmp_path)))
    for path, text in zip((flipped, linked), said, strict=True):
        assert "CorruptCheckpointError" in text
        assert f"step3_partial/{path.name}" in text
        assert "Nothing was loaded" in text


def test_what_is_not_there(tmp_path: Path) -> None:
    text = fails(resumes, 1, {"partitions": 1}, torch.float64, str(tmp_path))
    assert f"{tmp_path} has no checkpoint: there is no file newest" in text
    run_ranks(saves, 1, {"partitions": 1}, torch.float64, str(tmp_path))
    text = fails(lambda: resumes({"partitions": 1}, torch.float64, str(tmp_path), tag="step4"), 1)
    assert "has no partial checkpoint 'step4'. Tags of those that it has: step3" in text
    text = fails(lambda: resumes({"partitions": 1}, torch.float64, str(tmp_path), partial=False), 1)
    assert "A partial one of that tag is there: partial=True loads it" in text
    for tag in ("../a", "", ".a", "a/b", None):
        text = fails(lambda tag=tag: Script({"partitions": 1}).smp.save_checkpoint(str(tmp_path), tag), 1)
        assert "the tag of a checkpoint is" in text
