"""Runs the commands of README and docs in one folder, page by page, where what they read is there.

What a reader has already (a script, two runs of it, a model of Hugging Face) is made first. Later commands
find what a page makes.
"""

import shlex
import shutil
import subprocess
import sys
import webbrowser

import pytest

from pages import ROOT, blocks, typed
from shardwright.cli import main

TRAIN = """
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright.torch as sw

sw.init({"seed": 0, "microbatches": 2, "profile": "estimated"})
sizes = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
model = sw.DistributedModel(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)))
optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))


@sw.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


checkpoints = sw.Checkpoints(every=2)
for step in range(checkpoints.resume(), 4):
    optimizer.zero_grad()
    train_step(model, torch.arange(64).reshape(4, 16) % 32)
    optimizer.step()
    checkpoints.step_done(step + 1)
checkpoints.close()
"""

GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel
sizes = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained("gpt2")
"""

NOT_RUN = {
    "pip install": "needs the network",
    "python -m pip": "needs the network",
    "make": "installs what it needs; `make demo` is examples/demo.py",
    "python -m pytest": "sweeps of other tests",
    "shardwright ckpt import fsdp2": "into a run without checkpoints: tests/unit/cli/test_ckpt_dcp.py",
    "shardwright probe -n": "times a machine for half a minute: tests/e2e/test_planning_here.py",
    "export SHARDWRIGHT_PRICES": "names what that has written",
    "shardwright run -n 2 --set trackers=wandb": "tests/unit/observe has the trackers",
    "shardwright run -n 2 --set pipeline_parallel_degree=2 -m shardwright.integrations": "tests/ecosystem",
}
"""Why a command is not run, by its first words."""

CODES = {
    "shardwright compare gpt.json other.json": 1,  # they differ
}
"""Exit codes other than 0."""


def _commands():
    return [
        (str(block), line)
        for block in blocks("console")
        for line in typed(block)
        if not any(line.startswith(words) for words in NOT_RUN)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a reader has."""
    path = tmp_path_factory.mktemp("reader")
    for name in ("examples", "benchmarks"):
        (path / name).symlink_to(ROOT / name)
    (path / "train.py").write_text(TRAIN)
    (path / "faults.yaml").write_text("faults: [{kind: kill, rank: 1, step: 2}]")
    launcher = [sys.executable, "-m", "shardwright", "run", "-q", "-n", "2"]
    for words in ([sys.executable, "-c", GPT2], [*launcher, "train.py"], [*launcher, "--fresh", "train.py"]):
        subprocess.run(words, cwd=path, check=True, timeout=120)
    for name in ("NAME", "demo-2026-11-20_15-28-12", "2026-11-20_12-58-37"):
        shutil.copytree(path / "runs/train", path / "runs" / name)
    shutil.copytree(path / "gpt2", path / "SOURCE")
    make = [sys.executable, "-m", "shardwright", "plan", "examples/train_gpt.py:build", "-n", "2"]
    subprocess.run([*make, "--set", "pipeline=1f1b", "-o", "other.json"], cwd=path, check=True, timeout=120)
    return path


@pytest.mark.sweep
def test_commands_run(folder, monkeypatch, capfd):
    """In one test: later ones read what earlier ones write, and tests come in any order."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(webbrowser, "open", lambda *_: True)
    failed = {}
    for block, line in _commands():
        code, expected = _code_of(shlex.split(line, comments=True)), CODES.get(line.partition("  ")[0], 0)
        said = capfd.readouterr()
        if code != expected:
            failed[f"{block}: {line}"] = (code, said.err[-400:])
    assert failed == {}


def _code_of(words):
    if words[0] != "shardwright" or words[1] == "run":
        return subprocess.run([sys.executable, *_of_python(words)], timeout=120).returncode
    with pytest.raises(SystemExit) as ended:
        main(words[1:])
    return ended.value.code or 0


def _of_python(words):
    if words[0] == "python":
        return words[1:]
    assert words[0] == "shardwright", words
    return ["-m", *words]


def test_reasons_are_of_commands_that_are_there():
    lines = [line for block in blocks("console") for line in typed(block)]
    for words in NOT_RUN:
        assert any(line.startswith(words) for line in lines), words
