"""Section 3 of the API: the backend smddp, the functions of releases before 1.4, and how jobs end."""

import os
import re
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.testing import run_ranks
from smdistributed import dataparallel
from smdistributed.dataparallel.torch.rendezvous import tell_torch

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "848625665",
}


def test_the_collectives_of_the_backend():
    def on_each_rank():
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

        dist.init_process_group("smddp")
        rank = dist.get_rank()
        own = torch.tensor([rank + 1.0])
        result = {"backend": dist.get_backend()}
        for name, op in (("sum", dist.ReduceOp.SUM), ("mean", dist.ReduceOp.AVG), ("max", dist.ReduceOp.MAX)):
            x = own.clone()
            dist.all_reduce(x, op=op)
            result[name] = x.item()
        x = own.clone()
        dist.broadcast(x, 1)
        result["broadcast"] = x.item()
        x = own.clone()
        dist.reduce(x, 1)
        result["reduce"] = x.item() if rank == 1 else 3
        parts = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(parts, own)
        result["all_gather"] = [part.item() for part in parts]
        group = dist.group.WORLD
        whole = torch.zeros(2)
        group._allgather_base(whole, own).wait()
        result["_allgather_base"] = whole.tolist()
        part = torch.zeros(1)
        group._reduce_scatter_base(part, torch.tensor([1.0, 2.0])).wait()
        result["_reduce_scatter_base"] = part.item() / (rank + 1)
        alone = [dist.new_group([member]) for member in range(2)]
        x = own.clone()
        dist.all_reduce(x, group=alone[rank])
        result["new_group"] = x.item() - rank
        both = dist.new_group(backend="smddp")
        dist.barrier(both)
        dist.barrier()
        dist.destroy_process_group()
        return result

    first, second = run_ranks(on_each_rank, 2, init_process_group=False)
    assert first == second
    assert first == {
        "backend": "smddp",
        "sum": 3,
        "mean": 1.5,
        "max": 2,
        "broadcast": 2,
        "reduce": 3,
        "all_gather": [1, 2],
        "_allgather_base": [1, 2],
        "_reduce_scatter_base": 2,
        "new_group": 1,
    }


def _batch(rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def _weights_in_one_process():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(_batch(rank)).square().mean() / 2).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp2", "before 1.4"])
def test_stock_training_is_that_of_one_process(how):
    def on_each_rank():
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
        from smdistributed.dataparallel.torch.parallel import DistributedDataParallel

        dist.init_process_group("smddp")
        wrap = {
            "ddp": nn.parallel.DistributedDataParallel,
            "fsdp": partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True),
            "fsdp2": fully_shard,
            "before 1.4": DistributedDataParallel,
        }[how]
        model = wrap(_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(_batch(dist.get_rank())).square().mean().backward()
            optimizer.step()
        if how == "fsdp":
            with FullyShardedDataParallel.summon_full_params(model):
                return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
        return torch.cat([parameter.flatten() for parameter in whole])

    for weights in run_ranks(on_each_rank, 2, init_process_group=False):
        torch.testing.assert_close(weights, _weights_in_one_process(), rtol=0, atol=1e-12)


def test_the_functions_of_releases_before_1_4():
    def on_each_rank():
        import smdistributed.dataparallel.torch.distributed as dist

        before = dist.is_available(), dist.is_initialized()
        dist.init_process_group()
        dist.init_process_group()
        rank = dist.get_rank()
        own = torch.tensor([rank + 1.0])
        reduced = []
        for op in dist.ReduceOp:
            x = own.clone()
            dist.all_reduce(x, op)
            reduced.append((op.name, x.item()))
        x = own.clone()
        dist.all_reduce(x, group=dist.group.WORLD, async_op=True).wait()
        sent = own.clone()
        dist.broadcast(sent)
        parts = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(parts, own)
        swapped = torch.zeros(2)
        dist.all_to_all_single(swapped, torch.tensor([2.0, 3.0]) + 10 * rank)
        dist.barrier()
        return {
            "before": before,
            "place": (rank - dist.get_local_rank(), dist.get_world_size(), dist.is_initialized()),
            "reduced": reduced,
            "in the background": x.item(),
            "broadcast": sent.item(),
            "gathered": [part.item() for part in parts],
            "exchanged": [value - rank for value in swapped.tolist()],
        }

    first, second = run_ranks(on_each_rank, 2, init_process_group=False)
    assert first == second
    assert first == {
        "before": (True, False),
        "place": (0, 2, True),
        "reduced": [("AVERAGE", 1.5), ("SUM", 3), ("MIN", 1), ("MAX", 2)],
        "in the background": 3,
        "broadcast": 1,
        "gathered": [1, 2],
        "exchanged": [2, 12],
    }


def test_names_that_scripts_and_toolkits_look_up():
    assert [dataparallel._get_id_for_herring_task("all_reduce") for _ in range(2)] == [0, 1]
    from smdistributed.dataparallel import exceptions

    assert {issubclass(getattr(exceptions, name), Exception) for name in exceptions.__all__} == {True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            OPEN_MPI,
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
            | {"MASTER_ADDR": "127.0.0.1", "SMDATAPARALLEL_LOCAL_RANK": "1"},
        ),
        ({}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SMDATAPARALLEL_SERVER_ADDR": "algo-1"}
            | {"SMDATAPARALLEL_SERVER_PORT": "7592", "SMDATAPARALLEL_USE_HOMOGENEOUS": "1"},
            {"MASTER_ADDR": "algo-1", "MASTER_PORT": "7592", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "77"},
            {"RANK": "1", "MASTER_PORT": "77", "SMDATAPARALLEL_LOCAL_RANK": "1"},
        ),
    ],
    ids=["mpirun", "alone", "smddprun", "torchrun"],
)  # fmt: skip
def test_torch_is_told_what_the_launcher_says(given, expected):
    environ = dict(given)
    tell_torch(environ)
    assert environ.items() >= expected.items()


ENDS = """
    import sys
    import torch
    import torch.distributed as dist
    import smdistributed.dataparallel.torch.torch_smddp

    dist.init_process_group("smddp", world_size=2, rank=int(sys.argv[2]), store=None, group_name="")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for _ in range(3):
        model(torch.ones(4, 64)).sum().backward()
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    if sys.argv[1] == "destroys":
        work.wait()
        dist.destroy_process_group()
"""


def test_a_job_ends_without_a_barrier(tmp_path):
    """Without a barrier before, one job in three aborted: "terminate called without an active exception"."""
    (tmp_path / "train.py").write_text(textwrap.dedent(ENDS))
    environ = {name: value for name, value in os.environ.items() if not re.match("(OMPI|PMI|MASTER)", name)}
    job = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": f"{tmp_path}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", "destroys", str(rank)],
            cwd=tmp_path,
            env=environ | job | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert "terminate called" not in "".join(errors)


def test_the_commands_before_python_become_it():
    for words in (
        ["smdistributed.dataparallel.launcher"],
        ["smdistributed.dataparallel.launcher", "-i", "ml.p4d.24xlarge", "--allow-bypass"],
    ):
        code = "import sys; from smdistributed.dataparallel.launcher import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", code, *words[1:], sys.executable, "-c", "print('here', 3)"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "here 3\n"


def test_gradients_accumulate_without_sync():
    def on_each_rank():
        import smdistributed.dataparallel.torch.distributed as dist
        from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

        dist.init_process_group()
        model = DDP(nn.Linear(1, 1, bias=False), None, None, True, dist.group.WORLD, 25)
        x = torch.tensor([[dist.get_rank() + 1.0]])
        with model.no_sync():
            model(x).sum().backward()
        own = model.module.weight.grad.item()
        model(x).sum().backward()
        return own, model.module.weight.grad.item()

    assert run_ranks(on_each_rank, 2, init_process_group=False) == [(1, 3), (2, 3)]
