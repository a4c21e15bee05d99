"""The checks of `shardwright doctor --gpus`, on a CPU: what they run, and what becomes of those that fail."""

import dataclasses
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

import shardwright
from shardwright.cli import main
from shardwright.observe import doctor
from shardwright.testing import gpu_checks
from shardwright.testing.gpu_checks import CHECKS, Check, Machine, run_checks
from shardwright.testing.gpu_checks.training import Skipped

SRC = Path(shardwright.__file__).parent
EVERY_RUN = ("attention kernels", "one rank", "GradScaler", "checkpoint", "first values", "collectives")
ON_CPUS = [
    pytest.param(each, marks=() if each.name in EVERY_RUN else pytest.mark.thorough, id=each.name)
    for each in CHECKS
    if not each.needs_gpu
]


@pytest.mark.parametrize("check", ON_CPUS)
def test_checks_pass_on_a_cpu(check: Check) -> None:
    (result,) = run_checks(Machine("cpu", 0), [dataclasses.replace(check, timeout_s=400)])
    assert result.state == "pass", result.text
    assert result.text


def succeeds() -> str:
    return "3 GB/s"


def fails() -> str:
    raise AssertionError("weights differ by 1.0e+00 of the largest")


def dies() -> str:
    os._exit(9)


def hangs() -> str:
    time.sleep(60)
    return ""


def cannot() -> str:
    raise Skipped("torchao is not installed")


KINDS = (
    Check("fails", "", "", fails),
    Check("dies", "", "", dies, ranks=2),
    Check("hangs", "", "", hangs, timeout_s=1.5),
    Check("cannot", "", "", cannot),
    Check("on GPUs", "", "", succeeds, needs_gpu=True),
    Check("succeeds", "runs | well", "torch/startup.py comm/_private.py", succeeds),
)


def test_a_check_that_fails_ends_no_other() -> None:
    found = {each.check.name: (each.state, each.text) for each in run_checks(Machine("cpu", 0), KINDS)}
    assert found["fails"] == ("fail", "AssertionError: weights differ by 1.0e+00 of the largest")
    assert found["dies"][0] == "fail"
    assert re.match(r"rank [01]: exited with code 9", found["dies"][1])
    assert found["hangs"][0] == "fail"
    assert "within 1.5 s" in found["hangs"][1]
    assert found["cannot"] == ("skipped", "torchao is not installed")
    assert found["on GPUs"] == ("skipped", "it needs a GPU")
    assert found["succeeds"] == ("pass", "3 GB/s")


def test_what_a_machine_cannot_run() -> None:
    one, four = Machine("cuda", 1), Machine("cuda", 4)
    reasons = {each.name: one.refuses(each) for each in CHECKS if one.refuses(each)}
    assert reasons["two stages"] == "it needs 2 GPUs: NCCL takes one rank on each"
    assert reasons["all-reduce"] == "it needs 2 GPUs"
    assert "replicas on one card" not in reasons
    assert not any(map(four.refuses, CHECKS))
    assert {four.ranks_of(each) for each in CHECKS} == {1, 2, 4}


ELSEWHERE = frozenset(
    {
        "cli/commands/doctor.py",  # runs the checks
        "integrations/accelerate.py",  # asks whether there are GPUs
        "launch/engines/ray_driver.py",
        "launch/ranks/verdict.py",
        "torch/optimizer/optimizer_trial.py",
    }
)
"""Files that name CUDA, and lead through no path of their own."""


def test_the_table_has_every_file_that_touches_a_gpu() -> None:
    listed = {file for check in CHECKS for file in check.files.split()}
    assert [file for file in listed if not (SRC / file).exists()] == []
    apart = ("cpu_mode/", "tensorflow/", "testing/", "cluster/", "planner/", "observe/")
    touching = set()
    for path in SRC.rglob("*.py"):
        name = path.relative_to(SRC).as_posix()
        if not name.startswith(apart) and re.search(r'torch\.cuda\b|_cuda\.|"cuda"', path.read_text()):
            touching.add(name)
    assert touching - listed - ELSEWHERE == set()


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--gpus", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capsys.readouterr()


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("here is one")
    code, out, err = call(capsys)
    assert (code, out) == (4, "")
    assert err.startswith(f"LaunchError: --gpus tries out GPUs, but torch {torch.__version__} ")
    assert call(capsys, "--device", "tpu")[0] == 2


def test_the_block_for_an_issue(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "CHECKS", (KINDS[0], KINDS[3], KINDS[5]))
    monkeypatch.setattr(gpu_checks, "run_checks", lambda machine: run_checks(machine, gpu_checks.CHECKS))
    monkeypatch.setattr(doctor, "_problems", lambda *_: ["4 MB of shared memory are few"])
    code, out, _ = call(capsys, "--device", "cpu")
    assert code == 1
    head, block = out.split("\nFor an issue:\n\n")
    assert head.startswith("! 4 MB of shared memory are few\n\nfails ")
    assert block.startswith("`shardwright doctor --gpus`: 1 fail, 1 skipped, 1 pass\n")
    assert f"- torch: {torch.__version__.split('+')[0]}" in block
    assert re.search(r"\| succeeds \| pass \| [\d.]+ \| 3 GB/s \|", block)
    monkeypatch.setattr(gpu_checks, "CHECKS", KINDS[5:])
    code, out, err = call(capsys, "--device", "cpu", "--json")
    assert code == 0
    assert json.loads(out)["problems"] == ["4 MB of shared memory are few"]
    (row,) = json.loads(out)["checks"]
    assert (row["state"], row["files"]) == ("pass", ["torch/startup.py", "comm/_private.py"])
    assert "succeeds" in err
