"""``tensor_parallel_degree`` with settings that shard, and with 16 bits, under the names of smp."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smdistributed.modelparallel.torch as smp
from compat.small_models import QUIET
from compat.test_tensor_parallel import TWO, Run, batch
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

GIVEN = {"prescaled_batch": True}
ROWS = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 20,
    "sdp_gradient_clipping": 1e9,
}
STATE = {"shard_optimizer_state": True}


def loss_of_all(run: Run, index: int) -> list[float]:
    """The loss of all replicas, and that of plain PyTorch."""
    replicas = range(smp.rdp_size())
    parts = [batch(index, replica)[2 * i : 2 * i + 2] for i in range(2) for replica in replicas]
    losses = torch.tensor(run.train(batch(index, smp.rdp_rank()), torch.cat(parts)), dtype=torch.float64)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def test_replicas_share_parts_of_layers():
    def trained(settings: Any) -> Any:
        run = Run("GPT-2", {**GIVEN, **ROWS, "partitions": 2})
        losses = [loss_of_all(run, index) for index in range(3)]
        return losses, run.largest_difference()

    for losses, difference in run_ranks(trained, 8, {**ROWS, "partitions": 2}, timeout_s=240):
        assert all(found == pytest.approx(wanted, abs=2e-6) for found, wanted in losses)
        assert difference < 1e-5  # transformers computes losses in float32


def saved_and_resumed(folder: Path, settings: dict[str, Any]) -> Any:
    settings = {**GIVEN, **settings}
    run = Run("GPT-2", settings)
    losses = [loss_of_all(run, 0)]
    smp.save_checkpoint(folder, tag="one", partial=True, model=run.model, optimizer=run.optimizer)
    going_on = [loss_of_all(run, index)[0] for index in (1, 2)]
    smp.shutdown()
    smp.init({**QUIET, **TWO, **settings})
    smp.resume_from_checkpoint(folder, tag="one")
    resumed = Run("GPT-2", settings, seed=3)
    return losses[0], going_on, [loss_of_all(resumed, index)[0] for index in (1, 2)]


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [({"fp16": True, "partitions": 2}, 4), (ROWS, 4)],
    ids=["fp16", "rows"],
)
def test_16_bits_and_shared_states_resume_to_the_last_bit(tmp_path, settings, num_ranks):
    for first, going_on, resumed in run_ranks(
        saved_and_resumed, num_ranks, tmp_path, settings, timeout_s=240
    ):
        assert first[0] == pytest.approx(first[1], rel=1e-3)
        assert resumed == going_on


def moments_apart(run: Run, state: dict[str, Any]) -> float:
    """How far the moments of a whole state are from those of plain PyTorch."""
    names = [name for name, _ in run.model.get_module().named_parameters()]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    found = {name: state["state"][number]["exp_avg"] for name, number in zip(names, numbers, strict=True)}
    ((to_hf, _),) = smp.state.module_manager.translate_functions
    found = to_hf({**run.model.state_dict(), **found})
    wanted = {name: run.reference.state[p]["exp_avg"] for name, p in run.plain.named_parameters()}
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [(ROWS, 4), (STATE, 4)],
    ids=["rows", "state"],
)
def test_whole_states_of_rows_of_parts(settings, num_ranks):
    def on_rank(settings: dict[str, Any]) -> Any:
        run = Run("GPT-2", {**GIVEN, **settings})
        loss_of_all(run, 0)
        whole, state = run.model.state_dict(), run.optimizer.state_dict()
        parts = copy.deepcopy(run.optimizer.local_state_dict(gather_if_shard=False))
        apart = moments_apart(run, state)
        losses = []
        for each in (None, state, parts):
            if each is not None:
                run.model.load_state_dict(whole)
                run.optimizer.load_state_dict(each)
            losses.append([loss_of_all(run, index)[0] for index in (1, 2)])
        return apart, losses

    for apart, (going_on, *again) in run_ranks(on_rank, num_ranks, settings, timeout_s=240):
        assert apart < 1e-7  # transformers computes losses in float32
        assert all(losses == going_on for losses in again)


def test_a_communication_hook_is_refused():
    def on_rank() -> str:
        run = Run("GPT-2", GIVEN)
        with pytest.raises(UsageError) as caught:
            run.model.register_comm_hook(None, lambda state, bucket: None)
        return str(caught.value)

    for text in run_ranks(on_rank, 2):
        assert "a communication hook reduces whole gradients, and tensor_parallel_degree is 2" in text
