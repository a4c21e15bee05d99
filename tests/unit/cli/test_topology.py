"""search and catalogue on the command line."""

import json
from pathlib import Path

import pytest

from cli.calling import call
from shardwright.plan import Plan

MODELS = Path(__file__).with_name("models.py")
NEOX = ("gpt-neox-20b", "p4d.24xlarge*4")


def test_search(capsys):
    code, out, _ = call(capsys, "search", *NEOX, "--batch", "512")
    assert code == 0
    verdict, rate, asked, *_ = out.splitlines()
    assert verdict.startswith("tensor 2, pipeline 4")
    assert " s a step, " in rate
    assert asked == (
        "gpt-neox-20b, 20.6 billion parameters, on p4d.24xlarge x 4 (32 ranks), 512 samples of 2048 tokens, "
        "the model's usual length, a step"
    )
    assert "tokens/s" in out
    assert "dollars a million tokens" in out
    assert "Peak memory (busiest rank): " in out


def test_all_ways_are_shown_on_request(capsys):
    code, out, _ = call(capsys, "search", "llama3-70b", "p5.48xlarge x 16", "-b", "1024", "--all-ways")
    assert code == 0
    assert "*: this version does not run " in out


def test_degrees_are_such_as_one_would_operate(capsys):
    """The fastest way on 54 nodes has 27 stages and one replica."""
    words = ("search", "gpt3-175b", "dgx-h100*54", "-b", "1728", "--json")
    operable, all_ways = (
        json.loads(call(capsys, *words, *more)[1])["best"]["options"] for more in ([], ["--all-ways"])
    )
    degrees = ("tensor", "pipeline", "context", "expert")
    assert all((operable[name] & (operable[name] - 1)) == 0 for name in degrees)
    assert operable["data"] > 1
    assert any(all_ways[name] != operable[name] for name in degrees)


def test_products_in_8_bits(capsys):
    words = ("search", "llama3-8b", "dgx-h100", "-b", "128", "--runtime", "megatron", "--json")
    seconds = [
        json.loads(call(capsys, *words, "--dtype", dtype)[1])["best"]["step_s"] for dtype in ("bf16", "fp8")
    ]
    assert 0.5 < seconds[1] / seconds[0] < 0.8
    code, _, err = call(capsys, "search", "llama3-8b", "dgx-a100-80gb", "-b", "128", "--dtype", "fp8")
    assert code == 2
    assert "A100-80GB has no rate for 'float8'" in err


def test_a_configuration_file_as_model(capsys, tmp_path):
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    fields = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    path.write_text(json.dumps(fields | {"n_positions": 1024}))
    code, out, _ = call(capsys, "search", str(path), "rtx4090x4", "-b", "64")
    assert code == 0
    assert "\ntiny, 124.4 million parameters, on rtx4090x4 x 1 (4 ranks)" in out


def test_nothing_fits(capsys):
    code, _, err = call(capsys, "search", "gpt3-175b", "rtx4090x4", "-b", "8")
    assert code == 3
    assert "What would help:" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gpt-neox-20", "p4d.24xlarge"), "did you mean gpt-neox-20b"),
        (("gpt-neox-20b", "p4.24xlarge"), "did you mean p4d.24xlarge"),
        (("gpt-neox-20b", "p4d.24xlarge*0"), "is not a number of nodes"),
        (("gpt-neox-20b", "p4d.24xlarge*4@fast"), "'fast' is no rate of a network; such are 10Gbit and 50GB"),
        (("gpt-neox-20b", "p4d.24xlarge*4@0Gbit"), "'0Gbit' is no rate of a network"),
        (("gpt-neox-20b", "p4d.24xlarge*4", "--dtype", "int3"), "has no rate for 'int3'"),
        ((*NEOX, "--pin", "tensor=3"), "no way to train has tensor=3"),
        ((*NEOX, "--objective", "fun"), "must be one of speed, memory, batch"),
        ((*NEOX, "--optimizer", "lion"), "must be one of adamw, adamw-bf16, adamw-8bit, sgd, or a number"),
        ((*NEOX, "--trained", "0"), "must be above 0, and at most 1"),
        ((*NEOX, "--frozen-bytes", "9"), "must be above 0, and at most 8"),
        (("missing/config.json", "p4d.24xlarge"), "cannot be read"),
    ],
)
def test_what_cannot_be_searched(capsys, words, message):
    code, _, err = call(capsys, "search", *words, "-b", "512")
    assert code == 2
    assert message in err


def test_catalogue(capsys):
    code, out, _ = call(capsys, "catalogue")
    assert code == 0
    for name in ("mixtral-8x7b", "p5.48xlarge", "8 x H100-80GB", "98.32"):
        assert name in out
    assert "8 x A100-40GB" in call(capsys, "catalogue", "p4d.24xlarge*2")[1]
    assert call(capsys, "catalogue", "-o", "mine.yaml")[0] == 2
    code, out, _ = call(capsys, "catalogue", "--json")
    assert json.loads(out)["machines"]["p4d.24xlarge"]["network_Bps"] == 50e9


def test_cheapest(capsys):
    words = ("search", "llama3-8b", "p5.48xlarge*4", "--batch", "64", "--tokens", "1e11", "--days", "6")
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert "->" in out
    code, _, err = call(capsys, *words[:-1], "0.001")
    assert code == 3
    assert "no number of these machines trains within" in err


def test_any_model_can_be_searched(capsys, tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build():\n"
        "    blocks = (nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8))\n"
        "    return nn.Sequential(*blocks), torch.zeros(4, 512)\n"
        "def fails():\n"
        "    raise RuntimeError('no data here')\n"
    )
    code, out, _ = call(capsys, "search", f"{tmp_path}/net.py:build", "p4d.24xlarge*2", "-b", "4096")
    assert code == 0
    assert "samples/s" in out
    code, _, err = call(capsys, "search", f"{tmp_path}/net.py:fails", "p4d.24xlarge*2", "-b", "4096")
    assert code == 2
    assert "RuntimeError: no data here" in err
    code, out, _ = call(capsys, "catalogue")
    assert "gpt-neox-20b" in out


def test_a_search_ends_in_a_plan(capsys, tmp_path):
    output = tmp_path / "plan.json"
    words = (f"{MODELS}:build", "this-cpu", "-b", "16", "--dtype", "float32", "--pin", "pipeline=2")
    code, out, err = call(capsys, "search", *words, "-o", output)
    assert code == 0
    assert "pipeline 2 (" in out
    assert f"shardwright run -n 2 --plan {output}" in err
    plan = Plan.read(output)
    assert f"plan: {plan.schedule.kind}, {plan.schedule.microbatches} microbatch" in out
    assert (plan.mesh.pipeline, plan.mesh.data) == (2, 1)
    assert any(sentence.startswith("Searched: of ") for sentence in plan.why)
    assert call(capsys, "show", output)[0] == 0


def test_the_optimizer_counts(capsys):
    """Of 8 ranks that share layers: parameters in 16 bits, a copy in 32."""
    words = ("search", "llama3-8b", "p4d.24xlarge", "-b", "512", "--pin", "tensor=8", "--json")
    found = {}
    for optimizer in ("adamw", "adamw-bf16", "adamw-8bit", "sgd", "0"):
        code, out, _ = call(capsys, *words, "--optimizer", optimizer)
        assert code == 0
        best = json.loads(out)["best"]
        found[optimizer] = best["bytes"]["optimizer"] / best["bytes"]["parameters"] * 2
        assert best["settings"].get("optimizer_state") == {"adamw-bf16": "bf16", "adamw-8bit": "8bit"}.get(
            optimizer
        )
    expected = {"adamw": 12.0, "adamw-bf16": 8.0, "adamw-8bit": 6 + 1 / 32, "sgd": 8.0, "0": 4.0}
    assert found == pytest.approx(expected)


def test_frozen_weights_have_no_gradients_and_no_optimizer(capsys):
    """Adapters beside a base model of 4 bits train on one node, where all weights do not fit."""
    words = ("search", "llama3-70b", "p4d.24xlarge", "-b", "64", "-s", "2048", "--json")
    assert call(capsys, *words)[0] != 0
    bits = ("--frozen-bytes", "0.5")
    found = {}
    for more in ((), bits):
        code, out, _ = call(capsys, *words, "--trained", "0.005", *more)
        assert code == 0
        found[more] = json.loads(out)["best"]
    of_parameter = {
        more: {name: each["bytes"][name] / each["bytes"]["parameters"] for name in ("gradients", "optimizer")}
        for more, each in found.items()
    }
    assert of_parameter[()] == pytest.approx({"gradients": 0.005 * 2, "optimizer": 0.005 * 6})
    assert found[bits]["bytes"]["gradients"] < found[()]["bytes"]["parameters"] / 50
    assert found[bits]["settings"].get("tensor_parallel_degree", 1) == 1


def test_why_not(capsys):
    words = ("search", *NEOX, "-b", "512", "--why-not", "tensor=8,pipeline=4")
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert "The best with tensor=8, pipeline=4" in out
    code, out, _ = call(capsys, *words, "--json")
    found = json.loads(out)
    assert found["fits"] is True
    assert found["wanted"]["step_s"] > found["best"]["step_s"]
