"""Replicas that train on the same samples are told so, once."""

from types import SimpleNamespace

import pytest

from shardwright.mesh import Mesh
from shardwright.torch.step_end.training_alike import SameSamples

# The second rank of a pipeline may load anything.
SAME = [2.5, 1.0, 2.5, 1.1]
OTHERS = [2.5, 0.0, 2.4, 0.0]
TWO_REPLICAS = Mesh.of(world_size=4, pipeline=2, data=2)


@pytest.fixture
def told(caplog):
    """What is said of the batches of some steps."""

    def run(*steps: list[float], rank: int = 0, mesh: Mesh = TWO_REPLICAS) -> list[str]:
        caplog.clear()
        same = SameSamples(SimpleNamespace(mesh=mesh, rank=rank))  # type: ignore[arg-type]
        for digests in steps:
            assert same.look(digests, step=1) is None
        return [record.getMessage() for record in caplog.records]

    return run


def test_equal_samples_in_the_first_steps(told):
    (text,) = told(SAME, SAME, SAME)
    assert "all 2 replicas had the same samples in the first 2 steps" in text
    assert not told(SAME, SAME, rank=1)


@pytest.mark.parametrize(
    "steps", [[OTHERS, SAME, SAME], [SAME, OTHERS, SAME], [SAME], [[0.0] * 4] * 3], ids=str
)
def test_other_samples(told, steps):
    assert not told(*steps)


def test_one_replica(told):
    assert not told([2.5, 2.5], [2.5, 2.5], mesh=Mesh.of(world_size=2, pipeline=2))
