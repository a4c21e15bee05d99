"""What `init` says and does before there are ranks."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from observe.plans import two_stage_plan

import shardwright.torch as sw
from shardwright.comm.launch_environment import LaunchEnvironment
from shardwright.config import Config
from shardwright.errors import ConfigError, UsageError
from shardwright.mesh import Mesh
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.run_record import RunRecord, read_record
from shardwright.run import joining as joining_module
from shardwright.run.context import context
from shardwright.run.launch_settings import following


@pytest.fixture(autouse=True)
def run() -> Iterator[None]:
    yield
    sw.shutdown()


def test_the_first_line_says_which_ranks_there_are_and_who_said_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sw.init()
    assert capsys.readouterr().err == "shardwright: 1 rank (a single process)\n"


class JoinedError(Exception):
    """Instead of joining ranks that are not there."""


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> list[LaunchEnvironment]:
    """The environments with which ranks were to be joined, as rank 0 of 2."""
    found: list[LaunchEnvironment] = []

    def join(environment: LaunchEnvironment, **_: Any) -> None:
        found.append(environment)
        raise JoinedError

    monkeypatch.setattr(joining_module, "init_process_group", join)
    for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return found


def test_ranks_are_announced_before_they_are_waited_for(
    joining: list[LaunchEnvironment], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(JoinedError):
        sw.init()
    assert capsys.readouterr().err.startswith("shardwright: 2 ranks (")


def test_the_port_of_the_settings_serves_where_the_environment_names_none(
    joining: list[LaunchEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read and never used."""
    with pytest.raises(JoinedError):
        sw.init({"ddp_port": 23456})
    monkeypatch.setenv("MASTER_PORT", "23457")
    with pytest.raises(JoinedError):
        sw.init({"ddp_port": 23456})
    assert [environment.master_port for environment in joining] == [23456, 23457]


@pytest.mark.parametrize(("run_dir", "files"), [("off", 0), ("mine", 1)])
def test_a_launched_script_may_want_no_run_folder(
    run_dir: str, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's folder is taken instead of the script's, but not against its will to have none."""
    (tmp_path / "run/logs").mkdir(parents=True)
    monkeypatch.setenv("SHARDWRIGHT_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    sw.init({"run_dir": run_dir})
    reporter = context().reporter
    assert reporter is not None
    with reporter.phase("anything"):
        pass
    assert len(list((tmp_path / "run").glob("config.json"))) == files
    assert not (tmp_path / "mine").exists()


def test_a_run_goes_on_though_a_host_has_left_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of the host that left had written that the run had ended."""
    (tmp_path / "logs").mkdir()
    RunRecord(script="train.py").ended(folder := RunFolder(tmp_path), 75)
    monkeypatch.setenv("SHARDWRIGHT_RUN_DIR", str(tmp_path))
    sw.init({"run_dir": "mine"})
    reporter = context().reporter
    assert reporter is not None
    with reporter.phase("anything"):
        pass
    record = read_record(folder)
    assert record is not None
    assert (record.state, record.exit_code) == ("running", None)


def test_settings_by_keyword_are_refused_with_the_line_to_write():
    """It was Python's TypeError."""
    with pytest.raises(
        UsageError, match=r'sw\.init has no option microbatches: .* Write sw\.init\(\{"microbatches": 4\}\)'
    ):
        sw.init(microbatches=4)


@pytest.mark.parametrize(
    ("own", "others", "says"),
    [
        ({"microbatches": 2}, {"microbatches": 4}, "microbatches is 2 on rank 0, and 4 on rank 1"),
        ({}, {"pipeline": "gpipe"}, "pipeline is its default on rank 0, and 'gpipe' on rank 1"),
        ({}, {"shard_optimizer_state": True}, "shard_optimizer_state is its default"),
        ({"steps": 6}, {"steps": 7}, "steps is 6 on rank 0, and 7 on rank 1"),
        ({"trace": True}, {}, "trace is True on rank 0, and its default on rank 1"),
        ({"on_nonfinite": "skip"}, {}, "on_nonfinite is 'skip' on rank 0, and its default on rank 1"),
        ({}, {"measure_s": 1}, "measure_s is its default on rank 0, and 1.0 on rank 1"),
        ({}, {"shared_memory": False}, "shared_memory is its default on rank 0, and False on rank 1"),
        ({"memory_limit": 2**30}, {"seed": 1}, ""),
    ],
)
def test_ranks_with_other_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], others: dict[str, Any], says: str
) -> None:
    """It was a KeyError in the first step, on one of them; or a rank that waited for what none sent."""
    mesh, told = Mesh.of(world_size=2, pipeline=2), []

    def gather(mine: Any) -> list[Any]:
        told.append(mine)
        return told if len(told) == 2 else [mine, mine]

    monkeypatch.setattr(joining_module, "tell_all", gather)
    joining_module._alike_settings(mesh, Config.parse(own), "facts")
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        joining_module._alike_settings(mesh, Config.parse(others), "facts")


@pytest.mark.parametrize(("own", "found"), [({}, True), ({"shard_optimizer_state": False}, False)])
def test_a_script_may_say_otherwise_than_a_plan(own: dict[str, Any], found: bool) -> None:
    plan = two_stage_plan().model_copy(update={"pins": {"shard_optimizer_state": True}})
    config = Config.merge(own, {"microbatches": 3})
    assert following(plan, config, warns=True).shard_optimizer_state is found
