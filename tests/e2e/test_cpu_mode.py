"""Scripts that hard-code CUDA, with and without CPU mode."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwright.cpu_mode import _private
from shardwright.cpu_mode.__main__ import main
from shardwright.cpu_mode.activation import backend_on_cpu
from shardwright.cpu_mode.tensors import FACTORIES

SCRIPTS = Path(__file__).parent / "cuda_scripts"
CPU_MODE = ["-m", "shardwright.cpu_mode"]

pytestmark = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="CUDA works without CPU mode")


def python(*words, cwd=None, **environ):
    return subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", *map(str, words)],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def asked():
    """What became of each thing that scripts ask of CUDA; and what the script saw of itself."""
    return python(*CPU_MODE, SCRIPTS / "asks_for_cuda.py", "--epochs", "3")


def test_what_scripts_hard_code_of_cuda_works(asked):
    assert asked.returncode == 0, asked.stderr
    assert {name: said for name, said in json.loads(asked.stdout)["cases"].items() if said != "ok"} == {}


def test_what_it_says_of_itself(asked):
    """Once that it is in force; with the activity CUDA, profilers wrote the C++ frames of an error."""
    assert asked.stderr.count("CPU mode") == 1, asked.stderr
    assert "CUDA event" not in asked.stderr


def test_every_function_of_torch_cuda_has_a_stand_in(asked):
    # What is left are classes of errors, and a decorator of PyTorch's own.
    assert json.loads(asked.stdout)["left alone"] == ["CudaError", "DeferredCudaCallError", "cudaStatus"]


def test_without_it_the_same_calls_fail():
    result = python(SCRIPTS / "asks_for_cuda.py")
    assert result.returncode == 0, result.stderr
    assert "CPU mode" not in result.stderr
    cases = json.loads(result.stdout)["cases"]
    assert [name for name, said in cases.items() if said == "ok"] == []


def test_nccl_is_gloo_on_ranks(tmp_path):
    command = ["-m", "shardwright", "run", "-n", "2", "--run-dir", tmp_path]
    result = python(*command, "--device", "cpu", SCRIPTS / "trains_on_cuda.py", tmp_path / "checkpoint")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = re.findall(r"losses (.*)", result.stdout)
    assert len(lines) == 2
    losses = {loss for line in lines for loss in line.split()}
    assert len(losses) == 1  # of both ranks, with DDP and with parameters that are sharded in two ways
    assert (result.stdout + result.stderr).count("CPU mode") == 1


def test_a_script_for_cuda_fails_on_ranks_without_it(tmp_path):
    command = ["-m", "shardwright", "run", "-n", "1", "--run-dir", tmp_path]
    result = python(*command, SCRIPTS / "trains_on_cuda.py")
    assert result.returncode == 5
    assert "this script needs a GPU" in result.stderr


def test_processes_that_it_starts_have_it():
    result = python(*CPU_MODE, SCRIPTS / "spawns.py")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"child {number} True True" for number in range(3)]
    assert result.stderr.count("CPU mode") == 1


def test_a_module_runs_as_python_would_run_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "name.py").write_text("NAME = 'ours'\n")
    (package / "__main__.py").write_text(
        "import sys, torch\nfrom .name import NAME\n"
        "print(NAME, __name__, __spec__.name, sys.argv[1:], sys.path[0], torch.cuda.is_available())\n"
    )
    result = python(*CPU_MODE, "-m", "package", "a", cwd=tmp_path)
    assert result.stdout.split() == ["ours", "__main__", "package.__main__", "['a']", str(tmp_path), "True"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "the script missing.py cannot be read: No such file"),
        (["-m", "missing"], "there is no module missing that can be run"),
        ([], "usage: python -m shardwright.cpu_mode SCRIPT"),
    ],
)
def test_what_cannot_be_started_is_a_mistake_of_usage(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # the first is taken out, as that of the starter
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_script_that_fails_fails_with_its_own_error(tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntorch.zeros(2, device='cuda') @ torch.zeros(3)\n")
    result = python(*CPU_MODE, "train.py", cwd=tmp_path)
    assert result.returncode == 1
    assert 'File "train.py", line 2' in result.stderr
    assert "RuntimeError" in result.stderr


def test_it_knows_every_function_that_pytorch_says_makes_tensors():
    made = {f.__name__ for f in _private.device_constructors() if getattr(torch, f.__name__, None) is f}
    assert made - set(FACTORIES) == set()


@pytest.mark.parametrize(
    ("backend", "on_cpu"),
    [
        ("nccl", "gloo"),
        ("NCCL", "gloo"),
        ("cpu:gloo,cuda:nccl", "gloo"),
        ("cpu:mpi,cuda:nccl", "mpi"),
        ("cuda:nccl", "gloo"),
        ("gloo", "gloo"),
        ("smddp", "smddp"),
        (None, None),
    ],
)
def test_backends_for_gpus_become_those_for_cpus(backend, on_cpu):
    assert backend_on_cpu(backend) == on_cpu
