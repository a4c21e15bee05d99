"""Shards cut parameters as torch.chunk does, and put back together they are the whole.

Ranks, coordinates and groups.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ConfigError
from shardwright.mesh import Axis, Mesh, canonical_placement
from shardwright.placement import ShardLayout

shapes = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)


@given(shapes, st.integers(1, 6))
def test_rows_are_those_of_chunk(shapes, num_shards):
    layout = ShardLayout(shapes, num_shards)
    for index, shape in enumerate(shapes):
        rows = [list(layout.rows(index, shard)) for shard in range(num_shards)]
        assert [row for part in rows for row in part] == list(range(shape[0]))
        expected = torch.arange(shape[0]).chunk(num_shards) if shape[0] else ()
        assert [part for part in rows if part] == [part.tolist() for part in expected]


@given(shapes, st.integers(1, 6))
def test_the_shards_of_a_parameter_lie_one_after_the_other_in_the_whole(shapes, num_shards):
    layout = ShardLayout(shapes, num_shards)
    assert layout.whole_size == layout.shard_size * num_shards
    parameters = [torch.randn(shape) for shape in shapes]
    shards = torch.zeros(num_shards, layout.shard_size)
    whole = torch.zeros(layout.whole_size)
    for index, parameter in enumerate(parameters):
        start, size = layout.starts[index], layout.piece_sizes[index]
        for shard in range(num_shards):
            rows = layout.rows(index, shard)
            part = parameter[rows.start : rows.stop]
            assert tuple(part.shape) == layout.piece_shape(index, shard)
            shards[shard, start : start + part.numel()] = part.flatten()
        first = layout.whole_start(index)
        whole[first : first + size * num_shards] = shards[:, start : start + size].flatten()
        assert torch.equal(whole[first : first + parameter.numel()].view(parameter.shape), parameter)


DEGREES = st.integers(1, 4)
PLACEMENTS = st.sampled_from(["".join(letters) for letters in itertools.permutations("DPT")])
NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
KINDS = ("world", "dp", "rdp", "mp", *NAMES)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Any sizes along all six axes, in any order."""
    return Mesh(tuple(Axis(name, draw(st.integers(1, 3))) for name in draw(st.permutations(NAMES))))


@st.composite
def meshes_of_settings(draw: st.DrawFn) -> Mesh:
    p, replicas, shard, t = draw(DEGREES), draw(DEGREES), draw(DEGREES), draw(DEGREES)
    d = replicas * shard
    return Mesh.of(
        world_size=p * d * t, pipeline=p, data=d, tensor=t, shard=shard, placement=draw(PLACEMENTS)
    )


def test_rank_formula_of_dpt_and_ptd() -> None:
    # The documented example: 8 ranks, degrees 2 * 2 * 2.
    dpt = Mesh.of(world_size=8, pipeline=2, data=2, tensor=2, placement="DPT")
    ptd = Mesh.of(world_size=8, pipeline=2, data=2, tensor=2, placement="PTD")
    for rdp, pp, tp in itertools.product(range(2), repeat=3):
        assert dpt.rank_of(pp=pp, rdp=rdp, tp=tp) == 4 * rdp + 2 * pp + tp
        assert ptd.rank_of(pp=pp, rdp=rdp, tp=tp) == 4 * pp + 2 * tp + rdp


def test_groups_of_two_partitions_on_eight_ranks() -> None:
    spread = Mesh.of(world_size=8, pipeline=2, data=4, placement="spread")
    assert spread.groups("mp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert spread.groups("dp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    cluster = Mesh.of(world_size=8, pipeline=2, data=4, placement="cluster")
    assert cluster.groups("mp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert cluster.groups("dp") == ((0, 2, 4, 6), (1, 3, 5, 7))


@given(meshes())
def test_groups_partition_the_world(mesh: Mesh) -> None:
    for kind in KINDS:
        groups = mesh.groups(kind)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {mesh.group_size(kind)}
        for group in groups:
            assert all(mesh.group(kind, rank) == group for rank in group)


@given(meshes(), st.sets(st.sampled_from(NAMES)).map(tuple))
def test_any_union_of_axes_gives_groups(mesh: Mesh, axes: tuple[str, ...]) -> None:
    for rank in range(mesh.world_size):
        group = mesh.group(axes, rank)
        assert group == tuple(sorted(set(group)))
        assert len(group) == mesh.group_size(axes)
        assert group[mesh.group_rank(axes, rank)] == rank
        others = [name for name in NAMES if name not in axes]
        assert all(mesh.group_rank(o, r) == mesh.group_rank(o, rank) for o in others for r in group)


@given(meshes())
def test_positions_and_ranks_are_inverse(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        assert mesh.rank_of(**{name: mesh.group_rank(name, rank) for name in NAMES}) == rank
        assert mesh.rank_of(pp=mesh.group_rank("pp", rank), dp=mesh.group_rank("dp", rank)) == rank
        assert mesh.rank_of(mp=mesh.group_rank("mp", rank), rdp=mesh.group_rank("rdp", rank)) == rank


def test_ranks_share_a_batch_along_three_axes() -> None:
    mesh = Mesh.of(world_size=8, pipeline=2, data=2, context=2)
    assert (mesh.context, mesh.expert, mesh.tensor, mesh.share) == (2, 1, 1, 2)
    assert mesh.title == "pipeline(2) * data(2) * context(2)"
    assert mesh.shared_title == " x context 2"
    assert mesh.group("share", 1) == (1, 3)
    assert mesh.group("rdp", 1) == (1, 5)
    with pytest.raises(ConfigError, match=r"data\(2\) \* expert\(2\) != WORLD_SIZE\(8\)"):
        Mesh.of(world_size=8, data=2, expert=2)


def test_degrees_that_do_not_multiply() -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh.of(world_size=4, pipeline=3, data=2)
    assert str(caught.value).startswith("pipeline(3) * data(2) != WORLD_SIZE(4). Start 6 ranks")
    with pytest.raises(ConfigError, match=r"pipeline\(2\) \* data\(2\) \* tensor\(2\) != WORLD_SIZE\(4\)"):
        Mesh.of(world_size=4, pipeline=2, data=2, tensor=2)


@pytest.mark.parametrize("axis", ["pipeline", "data", "tensor"])
def test_degree_below_one(axis: str) -> None:
    with pytest.raises(ConfigError, match=f"{axis} is 0"):
        Mesh.of(world_size=1, **{axis: 0})


@pytest.mark.parametrize("placement", ["", "DP", "DPP", "clustered", "DPTX"])
def test_unknown_placement(placement: str) -> None:
    with pytest.raises(ConfigError, match="permutation of the letters D, P, T"):
        canonical_placement(placement)


def test_out_of_the_grid() -> None:
    mesh = Mesh.of(world_size=2, pipeline=2)
    with pytest.raises(ConfigError, match="rank 2 is not in a world of 2"):
        mesh.group_rank("pp", 2)
    with pytest.raises(ConfigError, match="rank -1 is not in a world of 2"):
        mesh.group("pp", -1)
    with pytest.raises(ConfigError, match="position pp is 2, but it runs from 0 to 1"):
        mesh.rank_of(pp=2)
    with pytest.raises(ConfigError, match="'qp' is not an axis of the mesh: use pp, dp_replicate"):
        mesh.group("qp", 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        ((Axis("pp", 2), Axis("pp", 2)), "each of pp, dp_replicate, .* goes once"),
        ((Axis("dp", 2),), "the axes are dp, but"),  # type: ignore[arg-type]
        ((Axis("cp", 0),), "cp is 0, but the size of an axis is at least 1"),
    ],
)
def test_axes_that_make_no_grid(axes: tuple[Axis, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Mesh(axes)


def test_an_order_that_settings_cannot_ask_for_has_no_letters() -> None:
    mesh = Mesh((Axis("dp_replicate", 2), Axis("pp", 2), Axis("dp_shard", 2)))
    with pytest.raises(ConfigError, match="has no name of three letters"):
        _ = mesh.placement


@given(meshes_of_settings())
def test_shard_groups_and_replicas_of_shards_span_the_replicas(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        shard, replicas = mesh.group("dp_shard", rank), mesh.group("dp_replicate", rank)
        assert len(shard) == mesh.shard
        assert len(replicas) == mesh.data // mesh.shard
        assert set(shard) & set(replicas) == {rank}
        everyone = {other for member in replicas for other in mesh.group("dp_shard", member)}
        assert everyone == set(mesh.group("rdp", rank))
        data = [mesh.group_rank("rdp", member) for member in shard]
        assert data == list(range(data[0], data[0] + mesh.shard))


def test_a_shard_degree_that_does_not_divide() -> None:
    with pytest.raises(
        ConfigError, match=r"is 3, which does not divide the 4 replicas .* Use one of 1, 2, 4\."
    ):
        Mesh.of(world_size=8, pipeline=2, data=4, shard=3)
