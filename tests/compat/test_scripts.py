"""Scripts of each family, which hard-code CUDA: run as programs, by several launchers, without a GPU."""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

from shardwright.testing import run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
CPU_MODE = ("-m", "shardwright.cpu_mode")
WITHOUT_DROPOUT = ("--resid_pdrop", "0", "--embd_pdrop", "0", "--attn_pdrop", "0")
LOSS = re.compile(r"\b[Ll]oss:? (\d+\.\d+)")

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (openmpi-bin)")


def launch(command, script, *arguments, cwd, **environ):
    """Runs a script to its end; returns what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not re.match("SM_|OMPI_|PMI", name)}
    settings = {"SHARDWRIGHT_SET": json.dumps({"profile": "estimated", "run_dir": "off"})}
    words = [*command, SCRIPTS / script, *arguments]
    return subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**inherited, "OMP_NUM_THREADS": "1", **settings, **environ},
        capture_output=True,
        text=True,
        timeout=170,
    )


def on_cpu(num_ranks):
    return (sys.executable, "-m", "shardwright", "run", "-q", "--device", "cpu", "-n", num_ranks)


def mpirun(num_ranks, *starter):
    options = ("--allow-run-as-root", "--oversubscribe", "-np", num_ranks)
    return ("mpirun", *options, sys.executable, *CPU_MODE, *starter)


def torchrun(num_ranks):
    options = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}")
    return (sys.executable, "-m", "torch.distributed.run", *options, *CPU_MODE)


def in_ranks(num_ranks, script, *arguments, cwd, **environ):
    """Runs a script in CPU mode in ranks that have imported the libraries; returns what they printed."""
    settings = {"SHARDWRIGHT_SET": json.dumps({"profile": "estimated", "run_dir": "off"})}

    def job():
        from shardwright.cpu_mode.__main__ import main
        from smdistributed import sagemaker

        sagemaker.provide()
        os.chdir(cwd)
        with open(f"printed{os.environ['RANK']}", "w") as printed, contextlib.redirect_stdout(printed):
            main([str(SCRIPTS / script), *map(str, arguments)])()

    run_ranks(job, num_ranks, init_process_group=False, env={**settings, **environ}, timeout_s=170)
    return "".join((cwd / f"printed{rank}").read_text() for rank in range(num_ranks))


def train(command, script, *arguments, cwd, **environ):
    """Like `launch`; the script must succeed."""
    result = launch(command, script, *arguments, cwd=cwd, **environ)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    return result.stdout


def losses(output):
    lines = [line for line in output.splitlines() if "alidation" not in line]
    return [float(loss) for line in lines for loss in LOSS.findall(line)]


@pytest.mark.filterwarnings("ignore")
def test_mnist_trains_saves_and_goes_on(tmp_path):
    output = train(on_cpu(2), "mnist.py", "--save-full-model", "--model-dir", "model", cwd=tmp_path)
    assert float(re.findall(r"accuracy (\d\.\d+)", output)[-1]) > 0.9
    assert output.count("SMP training finished successfully") == 2
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        "pt_mnist.pt",
        "pt_mnist_checkpoint.pt_0_0",
        "pt_mnist_checkpoint.pt_1_0",
    }
    state = torch.load(tmp_path / "model/pt_mnist.pt")["model_state_dict"]
    assert state["features.conv1.weight"].shape == (8, 1, 3, 3)
    assert len(state) == 8

    saved = ("--partial-checkpoint", "model/pt_mnist_checkpoint.pt", "--epochs", "1", "--amp", "1")
    resumed = in_ranks(2, "mnist.py", *saved, "--model-dir", "later", cwd=tmp_path)
    assert losses(resumed)[0] < losses(output)[0] / 4


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", ["gpt2", "gptj", "gpt_neox", "bloom"])
def test_an_architecture_trains_like_one_process(tmp_path, architecture):
    every = ("--model_type", architecture, "--max_steps", "4", *WITHOUT_DROPOUT)
    plain = ("--pipeline_parallel_degree", "1", "--microbatches", "1", "--activation_checkpointing", "0")
    alone = train((sys.executable, *CPU_MODE), "train_gpt_simple.py", *every, *plain, cwd=tmp_path)
    output = train(on_cpu(2), "train_gpt_simple.py", *every, cwd=tmp_path)
    assert losses(output) == pytest.approx(losses(alone), abs=2e-5)


@pytest.mark.filterwarnings("ignore")
def test_gpt2_saves_and_resumes(tmp_path):
    every = ("--max_steps", "4", *WITHOUT_DROPOUT, "--checkpoint-dir", "kept", "--model-dir", "model")
    options = ("--checkpoint_freq", "2", "--validation_freq", "2", "--save_final_full_model", "1")
    output = in_ranks(2, "train_gpt_simple.py", *every, *options, cwd=tmp_path)
    assert len(losses(output)) == 4
    assert "SMP training finished successfully after 4 steps" in output
    assert (tmp_path / "kept/newest").read_text().strip() == "total_steps4"
    assert "transformer.h.3.mlp.c_proj.weight" in torch.load(tmp_path / "model/fullmodel.pt")

    (tmp_path / "kept/newest").write_text("total_steps2")
    resumed = train(torchrun(2), "train_gpt_simple.py", *every, "--load_partial", "1", cwd=tmp_path)
    assert "Resumed at step 2" in resumed
    assert losses(resumed) == pytest.approx(losses(output)[2:], abs=2e-5)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_gpt2_in_three_dimensions_saves_and_resumes(tmp_path):
    """Pipeline 2 x tensor 2; the whole model loads into transformers' own."""
    degrees = ("--tensor_parallel_degree", "2", "--pipeline_parallel_degree", "2", "--prescaled_batch", "1")
    every = ("--max_steps", "4", *WITHOUT_DROPOUT)
    plain = ("--pipeline_parallel_degree", "1", "--microbatches", "1", "--activation_checkpointing", "0")
    alone = train((sys.executable, *CPU_MODE), "train_gpt_simple.py", *every, *plain, cwd=tmp_path)
    kept = ("--checkpoint-dir", "kept", "--model-dir", "model")
    saving = ("--checkpoint_freq", "2", "--save_final_full_model", "1")
    output = train(on_cpu(4), "train_gpt_simple.py", *every, *degrees, *kept, *saving, cwd=tmp_path)
    assert losses(output) == pytest.approx(losses(alone), abs=2e-5)
    files = {path.name for path in (tmp_path / "kept/total_steps2_partial").glob("model_*")}
    assert files == {"model_0_0.pt", "model_0_1.pt", "model_1_0.pt", "model_1_1.pt"}
    state = torch.load(tmp_path / "model/fullmodel.pt")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=53, n_positions=12, n_embd=32, n_layer=4, n_head=2)
    model = GPT2LMHeadModel(config)
    model.load_state_dict(state)
    assert torch.equal(model.transformer.h[3].mlp.c_proj.weight, state["transformer.h.3.mlp.c_proj.weight"])

    (tmp_path / "kept/newest").write_text("total_steps2")
    resumed = train(
        on_cpu(4), "train_gpt_simple.py", *every, *degrees, *kept, "--load_partial", "1", cwd=tmp_path
    )
    assert "Resumed at step 2" in resumed
    assert losses(resumed) == losses(output)[2:]


@pytest.mark.sweep
@needs_mpirun
@pytest.mark.skipif(util.find_spec("mpi4py") is None, reason="needs mpi4py")
def test_gptj_under_mpirun_and_mpi4py(tmp_path):
    """As the toolkit of SageMaker starts it, with stages by hand and settings on the command line."""
    options = ("--logits_output", "1", "--manual_partition", "1", "--mp_parameters", "microbatches=4")
    output = train(
        mpirun(2, "-m", "mpi4py"), "train_gpt_simple.py", "--model_type", "gptj", *options, cwd=tmp_path
    )
    assert losses(output)[-1] < losses(output)[0]


@pytest.mark.filterwarnings("ignore")
def test_gpt_neox_with_sharded_parameters(tmp_path):
    degrees = ("--pipeline_parallel_degree", "1", "--sharded_data_parallel_degree", "2", "--bf16", "1")
    options = ("--model_type", "gpt_neox", *degrees, "--microbatches", "1", "--max_steps", "6")
    output = in_ranks(2, "train_gpt_simple.py", *options, cwd=tmp_path)
    assert losses(output)[-1] < losses(output)[0]


@pytest.mark.filterwarnings("ignore")
def test_flan_t5_trains_evaluates_and_saves(tmp_path):
    arguments = ("--max_steps", "8", "--model_dir", "model")
    output = in_ranks(2, "train_flan_t5.py", *arguments, cwd=tmp_path, SM_MODEL_DIR="model", SM_NUM_GPUS="2")
    assert "(4, 8, 37)" in output
    assert losses(output)[-1] < losses(output)[0]
    assert "decoder.block.1.layer.2.DenseReluDense.wo.weight" in torch.load(tmp_path / "model/flan.pt")


@needs_mpirun
def test_ddp_with_smddp_under_mpirun(tmp_path):
    output = train(mpirun(2), "ddp_with_smddp.py", "--model-dir", ".", cwd=tmp_path)
    assert losses(output)[1] < losses(output)[0] - 0.2
    assert "module.fc.weight" in torch.load(tmp_path / "model.pt")


def _plain_llama(folder):
    """Trains what the script began with, in one process; gives its lines, and how far weights differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    first, last = (
        {re.sub(r"_(checkpoint|fsdp)_wrapped_module\.", "", key): value for key, value in state.items()}
        for state in (torch.load(folder / "first.pt"), torch.load(folder / "last.pt"))
    )
    model = LlamaForCausalLM(LlamaConfig(**json.loads((folder / "config.json").read_text())))
    model.load_state_dict(first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    lines = []
    for step in range(4):
        batch = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        lines.append([loss.item(), norm.item()])
    state = model.state_dict()
    assert last.keys() == state.keys()
    return lines, max(float((last[key] - state[key]).detach().abs().max()) for key in state)


def _lines(output):
    return [list(map(float, found)) for found in re.findall(r"loss: (\S+) norm: (\S+)", output)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("num_ranks", "degree", "options"),
    [
        (2, 2, ("--local", 1)),
        (2, 2, ("--use_orig_params", 0)),
        pytest.param(4, 2, ("--local", 1), marks=pytest.mark.sweep),
        pytest.param(4, 2, (), marks=pytest.mark.sweep),
        pytest.param(2, 1, (), marks=pytest.mark.sweep),
    ],
)
def test_a_script_for_torch_sagemaker(tmp_path, num_ranks, degree, options):
    """Hybrid shards, activations offloaded, asynchronous checkpoints: as in one process, also resumed."""
    environ = {"SM_HP_MP_PARAMETERS": json.dumps({"hybrid_shard_degree": degree})}
    run = functools.partial(in_ranks, num_ranks, "train_llama_v2.py", *options, cwd=tmp_path, **environ)
    lines = _lines(run("--save_at", 2, "--model_dir", "."))
    plain, farthest = _plain_llama(tmp_path)
    assert lines == [pytest.approx(line, rel=1e-5) for line in plain]
    assert farthest < 1e-5
    assert _lines(run("--resume", 1)) == lines[2:]
