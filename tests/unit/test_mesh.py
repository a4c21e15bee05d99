"""Ranks, coordinates and groups."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ConfigError
from shardwright.mesh import Coordinates, Mesh, canonical_placement

DEGREES = st.integers(1, 4)
PLACEMENTS = st.sampled_from(["".join(letters) for letters in itertools.permutations("DPT")])
KINDS = ("world", "pp", "tp", "rdp", "dp", "mp")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    p, d, t = draw(DEGREES), draw(DEGREES), draw(DEGREES)
    return Mesh(world_size=p * d * t, pipeline=p, data=d, tensor=t, placement=draw(PLACEMENTS))


def test_rank_formula_of_dpt_and_ptd() -> None:
    # The documented example: 8 ranks, degrees 2 * 2 * 2.
    dpt = Mesh(world_size=8, pipeline=2, data=2, tensor=2, placement="DPT")
    ptd = Mesh(world_size=8, pipeline=2, data=2, tensor=2, placement="PTD")
    for rdp, pp, tp in itertools.product(range(2), repeat=3):
        assert dpt.rank_of(pipeline=pp, data=rdp, tensor=tp) == 4 * rdp + 2 * pp + tp
        assert ptd.rank_of(pipeline=pp, data=rdp, tensor=tp) == 4 * pp + 2 * tp + rdp


def test_groups_of_two_partitions_on_eight_ranks() -> None:
    spread = Mesh(world_size=8, pipeline=2, data=4, placement="spread")
    assert spread.groups("mp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert spread.groups("dp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    cluster = Mesh(world_size=8, pipeline=2, data=4, placement="cluster")
    assert cluster.groups("mp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert cluster.groups("dp") == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_coordinates() -> None:
    mesh = Mesh(world_size=8, pipeline=2, data=4)
    assert mesh.coordinates(5) == Coordinates(pipeline=1, data=2, tensor=0)
    assert mesh.group("pp", 5) == (4, 5)
    assert mesh.group_rank("pp", 5) == 1
    assert mesh.group_rank("dp", 5) == 2
    assert mesh.group_size("dp") == 4


@given(meshes())
def test_groups_partition_the_world(mesh: Mesh) -> None:
    for kind in KINDS:
        groups = mesh.groups(kind)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {mesh.group_size(kind)}
        for group in groups:
            assert all(mesh.group(kind, rank) == group for rank in group)


@given(meshes())
def test_identities(mesh: Mesh) -> None:
    size = {kind: mesh.group_size(kind) for kind in KINDS}
    assert size["mp"] * size["rdp"] == mesh.world_size
    assert size["pp"] * size["dp"] == mesh.world_size
    assert size["pp"] * size["tp"] * size["rdp"] == mesh.world_size
    assert (size["mp"] * size["dp"] == mesh.world_size) == (mesh.tensor == 1)


@given(meshes())
def test_coordinates_and_ranks_are_inverse(mesh: Mesh) -> None:
    seen = set()
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        seen.add(at)
        assert mesh.rank_of(pipeline=at.pipeline, data=at.data, tensor=at.tensor) == rank
        assert mesh.group("pp", rank)[at.pipeline] == rank
        assert mesh.group("rdp", rank)[at.data] == rank
    assert len(seen) == mesh.world_size


def test_degrees_that_do_not_multiply() -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh(world_size=4, pipeline=3, data=2)
    assert str(caught.value).startswith("pipeline(3) * data(2) != WORLD_SIZE(4). Start 6 ranks")
    with pytest.raises(ConfigError, match=r"pipeline\(2\) \* data\(2\) \* tensor\(2\) != WORLD_SIZE\(4\)"):
        Mesh(world_size=4, pipeline=2, data=2, tensor=2)


@pytest.mark.parametrize("axis", ["pipeline", "data", "tensor"])
def test_degree_below_one(axis: str) -> None:
    with pytest.raises(ConfigError, match=f"{axis} is 0"):
        Mesh(world_size=1, **{axis: 0})


@pytest.mark.parametrize("placement", ["", "DP", "DPP", "clustered", "DPTX"])
def test_unknown_placement(placement: str) -> None:
    with pytest.raises(ConfigError, match="permutation of the letters D, P, T"):
        canonical_placement(placement)


def test_out_of_the_grid() -> None:
    mesh = Mesh(world_size=2, pipeline=2)
    with pytest.raises(ConfigError, match="rank 2 is not in a world of 2"):
        mesh.coordinates(2)
    with pytest.raises(ConfigError, match="rank -1 is not in a world of 2"):
        mesh.group("pp", -1)
    with pytest.raises(ConfigError, match="coordinate P is 2, but it runs from 0 to 1"):
        mesh.rank_of(pipeline=2)
    with pytest.raises(ConfigError, match="'qp' is not a kind of group"):
        mesh.group("qp", 0)  # type: ignore[arg-type]


@st.composite
def sharded_meshes(draw: st.DrawFn) -> Mesh:
    p, replicas, shard = draw(DEGREES), draw(DEGREES), draw(DEGREES)
    data = replicas * shard
    return Mesh(world_size=p * data, pipeline=p, data=data, shard=shard, placement=draw(PLACEMENTS))


@given(sharded_meshes())
def test_shard_groups_and_replicas_of_shards_span_the_replicas(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        shard, replicas = mesh.group("shard", rank), mesh.group("replicas", rank)
        assert len(shard) == mesh.shard
        assert len(replicas) == mesh.data // mesh.shard
        assert set(shard) & set(replicas) == {rank}
        everyone = {other for member in replicas for other in mesh.group("shard", member)}
        assert everyone == set(mesh.group("dp", rank))
        data = [mesh.coordinates(member).data for member in shard]
        assert data == list(range(data[0], data[0] + mesh.shard))


def test_a_shard_degree_that_does_not_divide() -> None:
    with pytest.raises(
        ConfigError, match=r"is 3, which does not divide the 4 replicas .* Use one of 1, 2, 4\."
    ):
        Mesh(world_size=8, pipeline=2, data=4, shard=3)
