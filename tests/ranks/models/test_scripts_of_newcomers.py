"""Scripts after the examples of PyTorch and of Accelerate train as in one process, with few lines changed."""

from statistics import median
from typing import Any

import pytest
from scripts_kit import Script, batch_losses, changed_lines, losses_of
from scripts_of_accelerate import SCRIPTS_OF_ACCELERATE
from scripts_of_images import SCRIPTS_OF_IMAGES
from scripts_of_words import SCRIPTS_OF_WORDS

from choices import in_sweep
from shardwright.testing import run_ranks

SCRIPTS = {**SCRIPTS_OF_IMAGES, **SCRIPTS_OF_WORDS, **SCRIPTS_OF_ACCELERATE}
WAYS: dict[str, dict[str, Any]] = {"stages": {}, "replicas": {"pipeline_parallel_degree": 1}}
IN_EVERY_RUN = [("vae", "stages"), ("mnist", "replicas"), ("gradient_accumulation", "stages")]


def _ways(script: Script) -> list[str]:
    return ["stages"] * script.spreads + ["replicas"] * script.replicates


CASES = [(name, way) for name, script in SCRIPTS.items() for way in _ways(script)]


@pytest.mark.parametrize(
    ("name", "way"), [case if case in IN_EVERY_RUN else in_sweep(*case) for case in CASES]
)
def test_scripts_of_newcomers_train_as_in_one_process(name: str, way: str, tmp_path: Any) -> None:
    script = SCRIPTS[name]
    env = {"HF_HUB_OFFLINE": "1", "FOLDER": str(tmp_path / "plain")}
    (plain,) = run_ranks(losses_of, 1, script, name, None, env=env)
    env["FOLDER"] = str(tmp_path / "ours")
    by_rank = run_ranks(losses_of, 2, script, name, WAYS[way], env=env)
    ours = batch_losses(script, by_rank) if way == "replicas" else by_rank[0]
    if way == "stages":
        assert by_rank[0] == by_rank[1]
    assert len(plain) >= 2
    assert ours == pytest.approx(plain, rel=1e-7)


def test_most_scripts_change_in_twelve_lines_or_fewer() -> None:
    counts = {name: changed_lines(script) for name, script in SCRIPTS.items()}
    assert median(counts[name] for name in (*SCRIPTS_OF_IMAGES, *SCRIPTS_OF_WORDS)) <= 12, counts
    assert median(counts[name] for name in SCRIPTS_OF_ACCELERATE) <= 2, counts
