"""The Trainer of transformers 4.28, whose branches for SageMaker run on this library: make test-trainer."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "finetune.py"
PARAMETERS = {"partitions": 2, "microbatches": 2, "ddp": True, "optimize": "speed"}
NO_DROPOUT = ("--dropout", "0")
ON_CPU = ("-m", "shardwright.cpu_mode", SCRIPT)
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np")

_VERSION = metadata.version("transformers") if util.find_spec("transformers") else "none"
pytestmark = pytest.mark.skipif(
    not _VERSION.startswith("4.28."), reason=f"for transformers 4.28, here is {_VERSION}: make test-trainer"
)


def start(command, arguments, *, cwd, parameters=None, data_parallel=False):
    """Trains in a folder, to the end; returns what the script reports."""
    framework = {
        "sagemaker_mpi_enabled": parameters is not None,
        "sagemaker_distributed_dataparallel_enabled": data_parallel,
    }
    environ = {name: value for name, value in os.environ.items() if not re.match("SM_|OMPI_|PMI", name)}
    environ |= {
        "SM_FRAMEWORK_PARAMS": json.dumps(framework),
        "SHARDWRIGHT_SET": '{"profile": "estimated"}',
        "OMP_NUM_THREADS": "1",
    }
    if parameters is not None:
        environ["SM_HP_MP_PARAMETERS"] = json.dumps(parameters)
    words = [*command, *arguments, "--model_dir", "model", "--output_data_dir", "output"]
    result = subprocess.run(
        list(map(str, words)), cwd=cwd, env=environ, capture_output=True, text=True, timeout=170
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return json.loads((cwd / "output/report.json").read_text())


def run(*arguments, num_ranks=2, **options):
    launcher = [sys.executable, "-m", "shardwright", "run", "-q", "--device", "cpu", "-n", num_ranks]
    return start([*launcher, SCRIPT], arguments, **options)


def losses(report, name="loss"):
    return [entry[name] for entry in report["history"] if name in entry]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What the Trainer does without this library, in one process."""
    return start([sys.executable, *ON_CPU], NO_DROPOUT, cwd=tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run over two epochs, with dropout: its folder, and its report."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run("--epochs", "2", cwd=folder, parameters=PARAMETERS)


def test_two_stages_train_like_one_process(plain, tmp_path):
    report = run(*NO_DROPOUT, cwd=tmp_path, parameters=PARAMETERS)
    assert report["steps"] == plain["steps"] == 8
    assert losses(report) == pytest.approx(losses(plain), abs=2e-4)  # it rounds to 4 digits
    assert losses(report, "eval_loss") == pytest.approx(losses(plain, "eval_loss"), rel=1e-4)
    assert losses(report, "eval_accuracy") == pytest.approx(losses(plain, "eval_accuracy"), abs=0.02)
    assert report["predictions"] == [16, 12, 41]


def test_what_it_saves_is_a_model_of_hugging_face(trained):
    import torch
    from transformers import GPT2LMHeadModel

    folder, report = trained
    assert {"user_content.pt", "pytorch_model.bin", "config.json"} <= {
        file.name for file in (folder / "model").iterdir()
    }
    model = GPT2LMHeadModel.from_pretrained(folder / "model").eval()
    ids = (1 + 3 * torch.arange(12)) % model.config.vocab_size
    loss = model(input_ids=ids[None], labels=ids[None]).loss.item()
    assert loss == pytest.approx(report["evaluation"]["eval_loss"], abs=0.5)
    assert loss < losses(report)[0]


def test_a_run_that_is_resumed_continues_as_if_it_had_not_ended(trained, tmp_path):
    folder, whole = trained
    (tmp_path / "output").mkdir()
    shutil.copytree(folder / "output/checkpoint-8", tmp_path / "output/checkpoint-8")
    report = run("--epochs", "2", "--resume", "1", cwd=tmp_path, parameters=PARAMETERS)
    assert report["steps"] == whole["steps"] == 16
    # Also the random numbers of dropout are those that would have come.
    assert losses(report) == losses(whole)
    assert losses(report, "eval_loss") == losses(whole, "eval_loss")


def test_half_precision(plain, tmp_path):
    """The loss scale of the library begins high, and its first steps are skipped until it fits."""
    arguments = (*NO_DROPOUT, "--fp16", "1", "--learning_rate", "1e-2")
    report = run(*arguments, cwd=tmp_path, parameters={**PARAMETERS, "fp16": True})
    assert losses(report)[-1] < losses(report)[0] - 0.3
    assert losses(report)[0] == pytest.approx(losses(plain)[0], rel=0.02)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (apt-get install openmpi-bin)")
def test_two_replicas_of_two_stages_under_mpirun(tmp_path):
    command = [*MPIRUN, 4, sys.executable, *ON_CPU]
    report = start(command, NO_DROPOUT, cwd=tmp_path, parameters=PARAMETERS)
    assert report["steps"] == 4  # two replicas share the data
    assert losses(report)[-1] < losses(report)[0]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (apt-get install openmpi-bin)")
def test_data_parallel_under_mpirun(tmp_path, plain):
    """The other branch of the Trainer: stock DDP with the backend smddp."""
    command = [*MPIRUN, 2, sys.executable, *ON_CPU]
    report = start(command, (*NO_DROPOUT, "--train_batch_size", "4"), cwd=tmp_path, data_parallel=True)
    assert report["steps"] == plain["steps"]
    assert losses(report) == pytest.approx(losses(plain), rel=0.02)
    assert losses(report, "eval_loss") == pytest.approx(losses(plain, "eval_loss"), rel=0.02)
