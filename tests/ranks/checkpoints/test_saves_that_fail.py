"""Saves in the background: what they see, what happens where they fail, and who is killed meanwhile."""

import errno
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import Dropped, training
from sharded import QUIET

import shardwright.torch as sw
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.errors import CheckpointError
from shardwright.run.context import context
from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}


def _started(folder: Path, plan: Path | None = None, **options: Any) -> tuple[Any, Any, Callable[[], None]]:
    """(model, checkpoints, a step) of a run that has made one step."""
    settings = {"plan": str(plan)} if plan else {"pipeline_parallel_degree": num_ranks(), "microbatches": 2}
    sw.init({**QUIET, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(Dropped().double())
    updates = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoints = sw.Checkpoints(folder, **options)

    @sw.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        model.backward(loss)
        return loss

    def step() -> None:
        updates.zero_grad()
        train(model, torch.arange(8).reshape(4, 2))
        updates.step()

    step()
    return model, checkpoints, step


def num_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def _before_disk(checkpoints: Any, action: Callable[[str, Path], None]) -> None:
    """Has something happen before each operation on the disk of this rank."""
    checkpoints._saves._disk._before = action


def _steps(folder: Path) -> list[int]:
    return [commit.step for commit in CheckpointFolder(folder).commits()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_snapshot_is_of_one_step(ranks: int, tmp_path: Path) -> None:
    """Weights, optimizer and buffers are overwritten as soon as save() returns."""

    def run() -> Any:
        model, checkpoints, _ = _started(tmp_path)
        _before_disk(checkpoints, lambda operation, path: time.sleep(0.01))
        state = {n: v.clone() for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
        checkpoints.save(1)
        for tensor in (*model.local_parameters(), *(b for _, b in model.local_named_buffers())):
            tensor.data.fill_(float("nan"))
        checkpoints.wait()
        return state

    from shardwright.torch.checkpoints.state_dict_files import read_part

    expected = run_ranks(run, ranks)[0]
    saved = CheckpointFolder(tmp_path).open()
    saved.check()
    for name, value in expected.items():
        assert torch.equal(read_part(saved, f"model/{name}"), value)


def test_one_save_at_a_time(tmp_path: Path) -> None:
    """A save that is due while another is written waits for it: there is never more than one copy."""

    def run() -> list[list[int]]:
        _, checkpoints, step = _started(tmp_path, every=1)
        may_write, foreground = threading.Event(), threading.current_thread()

        def hold_up(operation: str, path: Path) -> None:
            if threading.current_thread() is not foreground:
                may_write.wait(timeout=20)

        _before_disk(checkpoints, hold_up)
        written = []
        for number in (1, 2, 3):
            step()
            checkpoints.step_done(number)
            written.append(_steps(tmp_path))
            may_write.set()
        checkpoints.wait()
        return written

    first, second, third = run_ranks(run, 2)[0]
    assert first == []  # it goes on while the first is written
    assert 1 in second  # the writes of the one before
    assert 2 in third
    assert _steps(tmp_path) == [1, 2, 3]


def test_a_failed_save_is_raised_at_the_next_step_on_all_ranks(tmp_path: Path) -> None:
    def run() -> list[str]:
        _, checkpoints, step = _started(tmp_path)
        checkpoints.save(1)
        checkpoints.wait()

        def full(operation: str, path: Path) -> None:
            if operation == "write":
                raise OSError(28, "No space left on device", str(path))

        if sw.rank() == 1:
            _before_disk(checkpoints, full)
        step()
        checkpoints.save(2)  # in the background
        told = []
        for number in range(3, 200):
            step()
            try:
                checkpoints.step_done(number)
            except CheckpointError as error:
                told.append(str(error))
                break
        _before_disk(checkpoints, lambda operation, path: None)
        step()  # training goes on
        checkpoints.save(number + 1)
        checkpoints.wait()
        return told

    for told in run_ranks(run, 2):
        assert len(told) == 1
        assert "step 2 was not saved" in told[0]
        assert re.search(r"No space left .*: this rank has .*B to write, and .*iB were free\.", told[0])
        assert told[0].endswith('Those from before stay. on_failed_save="warn" trains on.')
    steps = _steps(tmp_path)
    assert len(steps) == 2
    assert steps[0] == 1
    assert not list(tmp_path.glob("*.tmp-*"))  # what the failed one had written does not fill the disk


def test_a_failed_save_may_only_warn(tmp_path: Path) -> None:
    """And a signal that comes then does not say that it was saved."""

    def run() -> list[str]:
        import warnings

        _, checkpoints, step = _started(tmp_path, on_failed_save="warn", asynchronous=False)

        def broken(operation: str, path: Path) -> None:
            if path.name.startswith("rank-"):
                raise OSError(5, "Input/output error")

        _before_disk(checkpoints, broken)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoints.save(1)
            step()
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                checkpoints.step_done(2)
            except CheckpointError as error:
                return [*(str(warning.message) for warning in caught), str(error)]
        return []

    for first, *_, last in run_ranks(run, 1):
        assert "step 1 was not saved" in first
        assert "Input/output error" in first
        assert "SIGTERM came, and step 2 was not saved" in last


@pytest.mark.parametrize("failing", [0, 1])
def test_a_snapshot_that_one_rank_cannot_take_is_none_on_all(failing: int, tmp_path: Path) -> None:
    """A state that cannot be written; the next save is made. Rank 0 has made a folder where rank 1 fails."""

    def run() -> str:
        model, checkpoints, _ = _started(tmp_path, keep=None)
        state = context().optimizers[0].state
        if sw.rank() == failing:
            *_, own = model.local_parameters()
            state[own] = {"note": object()}
        try:
            checkpoints.save(1)
        except CheckpointError as error:
            told = str(error)
        state.clear()
        checkpoints.save(2)
        sw.shutdown()  # waits for it
        return told

    for told in run_ranks(run, 2):
        assert "note is a builtins.object" in told
    assert _steps(tmp_path) == [2]
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.thorough
def test_what_an_optimizer_keeps_in_containers_comes_back(tmp_path: Path) -> None:
    """Lists of tensors, as Shampoo has them, and numbers; state of what is no parameter is refused."""

    def run(resumes: bool) -> Any:
        sw.init({**QUIET, **PIPELINE})
        model = sw.DistributedModel(Dropped(dropout=0.0).double())
        updates = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        checkpoints = sw.Checkpoints(tmp_path)
        checkpoints.resume()

        @sw.step
        def train(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).mean()
            model.backward(loss)
            return loss

        train(model, torch.arange(8).reshape(4, 2))
        if not resumes:
            for number, parameter in enumerate(model.local_parameters()):
                kept = [torch.full((2,), float(number + sw.rank())), {"deep": parameter.detach() * 2}]
                updates.state[parameter] = {"kept": kept, "steps": 7 + number}
            checkpoints.save(1, asynchronous=False)
            updates.state["global"] = {"k": 7}
            with pytest.raises(CheckpointError, match="has 'global', which is no parameter"):
                checkpoints.save(2)
        names = {id(p): name for name, p in model.local_named_parameters()}
        return {
            names[id(p)]: (values["kept"][0].tolist(), values["kept"][1]["deep"].tolist(), values["steps"])
            for p, values in updates.state.items()
            if isinstance(p, torch.Tensor)
        }

    saved, resumed = run_ranks(run, 2, False), run_ranks(run, 2, True)
    for before, after in zip(saved, resumed, strict=True):
        assert len(after) > 3
        for name, values in after.items():
            assert values in (each.get(name) for each in saved)
        assert before.keys() == after.keys()


def test_states_that_differ_by_rank_come_back_on_the_same_ranks(tmp_path: Path) -> None:
    class OfRank:
        def __init__(self, value: int):
            self.value = torch.tensor([value])

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.value = state["value"]

    def run(offset: int, ranks: int) -> tuple[int, str]:
        sw.init({**QUIET, "pipeline_parallel_degree": ranks, "microbatches": 2})
        sw.DistributedModel(Dropped().double())
        state = OfRank(sw.rank() + offset)
        checkpoints = sw.Checkpoints(tmp_path, state={"own": state})
        try:
            step = checkpoints.resume()
        except CheckpointError as error:
            return 0, str(error)
        if not step:
            checkpoints.save(1, asynchronous=False)
        return state.value.item(), ""

    assert [value for value, _ in run_ranks(run, 2, 10, 2)] == [10, 11]
    assert [value for value, _ in run_ranks(run, 2, 50, 2)] == [10, 11]
    assert "states that differ by rank (own)" in run_ranks(run, 1, 50, 1)[0][1]


@pytest.mark.thorough
def test_a_rank_killed_at_any_write_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Two ranks; one is killed before some operations on the disk in turn, and the next run resumes."""

    def run(folder: Path, at: int, plan: Path | None = None) -> int:
        _, checkpoints, step = _started(folder, plan)
        if not _steps(folder):
            checkpoints.save(1)
            checkpoints.wait()
        count = 0

        def die(operation: str, path: Path) -> None:
            nonlocal count
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        if sw.rank() == 1:
            _before_disk(checkpoints, die)
        step()
        checkpoints.save(2, asynchronous=False)
        return count

    total = run_ranks(run, 2, tmp_path / "counted", 10**6)[1]
    plan = CheckpointFolder(tmp_path / "counted").open().path / "plan.json"
    for at in (0, total - 1):
        folder = tmp_path / str(at)
        with pytest.raises(RanksFailedError):
            run_ranks(run, 2, folder, at, plan)
        assert _steps(folder) in ([1], [1, 2])
        CheckpointFolder(folder).open().check()


def test_a_save_does_not_wait_for_a_rank_that_has_ended(tmp_path: Path) -> None:
    """Where a rank failed, rank 0 ended 10 s later: it waited for what that rank had to write."""

    def run() -> str | None:
        _, checkpoints, _ = _started(tmp_path, None)
        if sw.rank() == 1:
            _before_disk(checkpoints, lambda operation, path: os.kill(os.getpid(), signal.SIGKILL))
        checkpoints.save(1)
        under_way = checkpoints._saves._under_way
        assert under_way is not None
        assert under_way.wait(30)
        return under_way.problem

    first, _ = run_ranks_outcomes(run, 2)
    assert "rank 1 has ended while the checkpoint of step 1 was written" in first.value


@pytest.mark.thorough
def test_damage_is_refused_and_an_older_one_taken_only_if_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(training, 2, PIPELINE, tmp_path, until=6)
    assert _steps(tmp_path) == [3, 6]
    damaged = tmp_path / "step-00000006" / "rank-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)

    refused = r"rank-00001\.safetensors is damaged.*resume\(allow_older=True\)"
    with pytest.raises(RanksFailedError, match=refused) as failed:
        run_ranks(training, 2, PIPELINE, tmp_path, until=9, first=6)
    # All ranks refuse it, not only the one that has read it.
    assert all(f"rank {rank}," in str(failed.value) for rank in (0, 1))
    run_ranks(training, 2, PIPELINE, tmp_path, until=6, first=3, resumes={"allow_older": True})
    assert "Going on from step-00000003, which is older" in capfd.readouterr().err
    run_ranks(training, 2, PIPELINE, tmp_path, until=7, first=6)  # saved anew beside the damaged one
    assert (tmp_path / "step-00000006.2").is_dir()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EMFILE, r"On rank 1: .*/state\.json could not be read: Too many open files\..* may be whole"),
        (errno.EIO, "step-00000001"),
    ],
)
def test_a_rank_that_cannot_read_is_no_reason_to_take_an_older_one(
    number: int, expected: str, tmp_path: Path
) -> None:
    """Bug: with too many files open on one rank, allow_older went on from the checkpoint before."""

    def run() -> str:
        from shardwright.torch.checkpoints.resuming import open_verified

        _, checkpoints, _ = _started(tmp_path)
        for step in (1, 2):
            checkpoints.save(step, asynchronous=False)
        plain, rank = os.open, context().rank

        def refuse(path: Any, *args: Any) -> int:
            if rank == 1 and str(path).endswith("step-00000002/state.json"):
                raise OSError(number, os.strerror(number), str(path))
            return plain(path, *args)

        os.open = refuse  # type: ignore[assignment]
        try:
            with warnings.catch_warnings(action="ignore"):
                found = open_verified(context(), CheckpointFolder(tmp_path), None, allow_older=True)
        except CheckpointError as error:
            return str(error)
        finally:
            os.open = plain
        assert found is not None
        return found.path.name

    assert all(re.match(expected, said) for said in run_ranks(run, 2))
