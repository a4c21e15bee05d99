"""``shardwright trace``."""

from cli.calling import call
from cli.models import Model


def test_units_ties_and_what_feeds_what(capsys):
    code, out, err = call(capsys, "trace", "cli.models:build")
    assert code == 0
    assert err.startswith("building cli.models:build ...\n")  # a time follows where it takes long
    assert "tracing the model ...\n" in err
    num_parameters = sum(parameter.numel() for parameter in Model().parameters())
    assert out.startswith(f"6 units, {num_parameters:,} parameters; of a microbatch of 8: ")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    # Two linear layers of 16 x 64, two operations each, for 8 sequences of 6.
    assert rows["blocks.0"][1:5] == ["Block", "8.3", "KiB", f"{2 * 2 * 16 * 64 * 48 / 1000:.1f}"]
    assert rows["embed"][-2:] == ["the", "next"]
    assert rows["blocks.0"][-2:] == ["blocks.1,", "blocks.3"]  # through an addition
    assert rows["head"][-2:] == ["the", "loss"]
    assert "tied: embed.weight = head.weight (3.1 KiB), used by embed, head" in out


def test_a_module_that_reads_values_is_one_unit(capsys):
    code, out, _ = call(capsys, "trace", "cli.models:build_reading", "--stages", 8)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines() if line[:1].isdigit()][1:] == [
        ["0", "Linear"],
        ["1", "Chooser"],
        ["2", "Linear"],
    ]


def test_a_model_without_a_loss_needs_one(capsys, tmp_path):
    (tmp_path / "m.py").write_text(
        "import torch\nclass M(torch.nn.Module):\n"
        "    def forward(self, x): return (x > 0,)\n"
        "def build(): return M(), torch.zeros(2)\n"
    )
    code, _, err = call(capsys, "trace", f"{tmp_path / 'm.py'}:build")
    assert code == 2
    assert "returns tuple without a tensor of floating-point numbers" in err
