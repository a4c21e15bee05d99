"""Ranks that share experts, and layers or sequences at once, train a model as one process does."""

from pathlib import Path

import pytest
from test_listed_experts import losses
from test_shared_experts import EXPERTS, TOLERANCES, case, check
from test_shared_sequences import clip_norm
from transparency import EVALUATION, Iteration

from choices import in_every_run, in_sweep, thorough
from shardwright.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

WHOLE = {"tensor_parallel_degree": 2}
CUT = {**WHOLE, "sequence_parallel": True}
SEQUENCES = {"context_parallel_degree": 2}
UNEVEN = (  # the second update is by the gradients of two steps
    Iteration(batch_size=7, length=6),
    Iteration(batch_size=7, length=6, update=False),
    Iteration(length=5, zero_grad=False),
)


@pytest.mark.sweep
@pytest.mark.parametrize("sequences", [in_sweep("whole"), thorough("cut")])
@pytest.mark.parametrize("name", in_every_run(EXPERTS, ["qwen2_moe"]))
def test_layers_and_experts_at_once(name, sequences):
    """Two ranks share layers, two share samples, and all four share experts; norms are counted once."""
    more = {"tolerance": TOLERANCES.get(name), "clip": clip_norm}
    cases = {
        "whole": case(2, WHOLE, iterations=(*UNEVEN, EVALUATION), **more),
        "cut": case(2, CUT, iterations=UNEVEN[1:], **more),
    }
    check(name, {sequences: cases[sequences]}, num_ranks=4)


@pytest.mark.parametrize("way", [in_sweep("steps"), thorough("recomputed")])
@pytest.mark.parametrize("name", in_every_run(EXPERTS, ["mixtral"]))
def test_sequences_and_experts_at_once(name, way):
    """Two ranks share sequences, two share samples, and all four share experts."""
    more = {"tolerance": TOLERANCES.get(name), "clip": clip_norm}
    uneven = (Iteration(length=6), Iteration(length=6), Iteration(batch_size=7, length=7))
    recomputed = {**SEQUENCES, "activation_checkpointing": "full"}
    cases = {
        "steps": case(2, SEQUENCES, iterations=uneven, **more),
        "recomputed": case(2, recomputed, iterations=uneven[1:], **more),
    }
    check(name, {way: cases[way]}, num_ranks=4)


GRID = {**WHOLE, "expert_parallel_degree": 2}
BY_EXPERT = {"expert_parallel_degree": 2}


@pytest.mark.parametrize(
    "layouts",
    [
        thorough([(4, GRID), (2, BY_EXPERT), (4, GRID)]),
        in_sweep([(4, GRID), (2, WHOLE), (4, {**BY_EXPERT, **SEQUENCES}), (2, BY_EXPERT), (4, GRID)]),
    ],
    ids=len,
)
def test_other_ranks_go_on_from_a_checkpoint_of_both(layouts, tmp_path: Path):
    """Of each kind of parameter, all ranks together save each element once."""
    plain = run_ranks(losses, 1, {}, tmp_path / "plain", 2 * len(layouts))[0]
    found: list[float] = []
    for num_ranks, settings in layouts:
        found += run_ranks(losses, num_ranks, settings, tmp_path / "shared", 2)[0]
    assert found == pytest.approx(plain, rel=1e-9)
