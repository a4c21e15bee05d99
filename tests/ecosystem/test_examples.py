"""The scripts of examples/ that are there to be copied: each trains on two ranks, and leaves what it says."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments, cwd, num_ranks=2, options=("--set", "pipeline_parallel_degree=2")):
    """What an example prints."""
    words = [
        "run",
        "-q",
        "-n",
        num_ranks,
        "--set",
        "profile=estimated",
        *options,
        EXAMPLES / name,
        *arguments,
    ]
    result = subprocess.run(
        [sys.executable, "-m", "shardwright", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def last_number(pattern, text):
    return float(re.findall(pattern + r" (\d+\.\d+)", text)[-1])


def test_the_whole_script_trains_resumes_and_saves(tmp_path):
    """Its averages are saved by two stages, and read by one rank."""
    steps = ("--steps", 60, "--every", 30)
    text = run("train.py", *steps, cwd=tmp_path)
    accuracy = last_number("accuracy", text)
    assert accuracy > 0.9
    assert list((tmp_path / "runs/train/tensorboard").iterdir())
    model = runpy.run_path(str(EXAMPLES / "train.py"))["Classifier"]()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    averaged = last_number("of averaged weights", text)
    again = run("train.py", *steps, cwd=tmp_path, num_ranks=1, options=("--resume",))
    assert last_number("accuracy", again) == pytest.approx(accuracy, abs=0.01)
    assert last_number("of averaged weights", again) == pytest.approx(averaged, abs=0.01)
    assert len((EXAMPLES / "train.py").read_text().splitlines()) < 120


@pytest.mark.parametrize(
    ("name", "library", "loss", "most", "made"),
    [
        ("trainer.py", "transformers", "evaluation loss", 3.9, "output/model/model.safetensors"),
        ("accelerate_loop.py", "accelerate", "loss", 0.66, "model/model.safetensors"),
        ("lightning_loop.py", "lightning", "validation loss", 1.0, "model.ckpt"),
        ("lora.py", "peft", "loss", 3.9, "adapter/adapter_model.safetensors"),
    ],
)
def test_a_loop_of_another_library(name, library, loss, most, made, tmp_path):
    pytest.importorskip(library)
    assert last_number(loss, run(name, cwd=tmp_path)) < most
    assert (tmp_path / made).is_file()
    assert len((EXAMPLES / name).read_text().splitlines()) < 60
