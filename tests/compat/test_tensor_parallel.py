"""``tensor_parallel_degree`` under the names of smp: ranks that share every layer of a stage."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from compat.small_models import QUIET
from shardwright.errors import CheckpointError, UsageError
from shardwright.testing import run_ranks
from six_models import build
from smdistributed.modelparallel.torch.state_mod import state

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

TWO = {"ddp": True, "tensor_parallel_degree": 2, "microbatches": 2}


def batch(index: int, replica: int = 0, size: int = 4) -> torch.Tensor:
    """Numbers of words."""
    generator = torch.Generator().manual_seed(100 * index + replica)
    return torch.randint(3, 96, (size, 12), generator=generator)


class Run:
    """A wrapped model, its optimizer and its step, beside the same of plain PyTorch."""

    def __init__(self, name: str, settings: dict[str, Any], *, seed: int = 0, **options: Any):
        if not smp.is_initialized():
            smp.init({**QUIET, **TWO, **settings})
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(seed)
        self.plain = build(name)
        torch.manual_seed(seed)
        with smp.model_creation(tensor_parallelism=True, **options):
            model = build(name)
        torch.manual_seed(smp.tp_rank())  # as published scripts do
        self.model = smp.DistributedModel(model)
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        self.reference = torch.optim.AdamW(self.plain.parameters(), lr=0.01)

        @smp.step
        def train_step(model: Any, ids: Any) -> Any:
            loss = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss

        self.step = train_step

    def train(self, own: torch.Tensor, whole: torch.Tensor | None = None) -> tuple[float, float]:
        """The losses of a step of both."""
        self.optimizer.zero_grad()
        loss = self.step(self.model, own).reduce_mean().item()
        self.optimizer.step()
        whole = own if whole is None else whole
        self.reference.zero_grad()
        parts = [self.plain(input_ids=ids, labels=ids).loss / 2 for ids in whole.tensor_split(2)]
        sum(parts).backward()
        self.reference.step()
        return loss, sum(parts).item()

    def largest_difference(self) -> float:
        """Between the parameters of both, under Hugging Face's names."""
        ((to_hf, _),) = smp.state.module_manager.translate_functions
        found, wanted = to_hf(self.model.state_dict()), self.plain.state_dict()
        assert set(found) == set(wanted)
        return max((found[key] - value).abs().max().item() for key, value in wanted.items())


def trained(name: str, settings: dict[str, Any], options: dict[str, Any]) -> Any:
    run = Run(name, {"prescaled_batch": True, **settings}, **options)
    losses = [run.train(batch(index)) for index in range(3)]
    named = run.model.local_named_parameters()
    cut = {name for name, p in named if "seq_layers" in name and run.model.is_distributed_parameter(p)}
    return losses, run.largest_difference(), cut


@pytest.mark.parametrize(
    ("name", "settings", "options"),
    [
        ("GPT-2", {}, {"distribute_embedding": True}),
        ("GPT-J", {"delayed_parameter_initialization": True}, {"flash_attention": False}),
        ("GPT-NeoX", {"placement_strategy": "TPD", "partitions": 2}, {}),
    ],
)
def test_models_train_as_without(name, settings, options):
    num_ranks = 2 * settings.get("partitions", 1)
    for losses, difference, cut in run_ranks(trained, num_ranks, name, settings, options, timeout_s=180):
        assert all(found == pytest.approx(wanted, abs=2e-6) for found, wanted in losses)
        assert difference < 1e-5  # transformers computes losses in float32
        assert {each.rpartition("layers.")[2].partition(".")[2] for each in cut} >= {
            "attention.dense.weight",
            "output.dense1.weight",
            "output.dense2.weight",
        }
        assert not any("layernorm" in each for each in cut)


def test_ranks_groups_and_parameters_say_how_they_are_shared():
    def asked() -> Any:
        run = Run("GPT-2", {"prescaled_batch": True})
        assert smp.state.cfg.tensor_parallel_degree == 2
        assert smp.get_tp_group() == smp.get_mp_group() == [2 * smp.rdp_rank(), 2 * smp.rdp_rank() + 1]
        assert smp.get_rdp_group() == [smp.tp_rank(), 2 + smp.tp_rank()]
        assert smp.get_dp_group() == [0, 1, 2, 3]
        assert (smp.tp_size(), smp.rdp_size(), smp.dp_size(), smp.mp_size()) == (2, 2, 4, 2)
        assert smp.allgather(smp.rank(), smp.TP_GROUP) == smp.get_tp_group()
        for group, ranks in (
            (smp.get_tp_process_group(), smp.get_tp_group()),
            (smp.get_rdp_process_group(), smp.get_rdp_group()),
            (smp.get_dp_process_group(), smp.get_dp_group()),
            (smp.get_mp_process_group(), smp.get_mp_group()),
        ):
            assert torch.distributed.get_process_group_ranks(group) == ranks
        loss = run.train(batch(0, smp.rdp_rank()))[0]
        named = dict(run.model.local_named_parameters())
        axes = {name: smp.utils.get_distribution_axis(parameter) for name, parameter in named.items()}
        layer = "transformer.seq_layers.0"
        assert axes[f"{layer}.attention.query.weight"] == axes[f"{layer}.output.dense1.bias"] == 0
        assert axes[f"{layer}.attention.dense.weight"] == axes[f"{layer}.output.dense2.weight"] == 1
        assert axes[f"{layer}.output.dense2.bias"] is None
        scaled = dict(run.model.scaled_batch_reducer_named_parameters())
        others = dict(run.model.default_reducer_named_parameters())
        assert scaled.keys() | others.keys() == named.keys()
        assert {name for name, axis in axes.items() if axis is not None} == scaled.keys()
        assert all(run.model.is_scaled_batch_parameter(parameter) for parameter in scaled.values())
        modules = list(run.model.distributed_modules())
        assert run.model.get_module().transformer.seq_layers[0].attention.query in modules
        assert run.model.get_module().transformer.ln_f not in modules
        names = state.param_name_to_index_tp_group
        assert len(names) == 2
        assert names[0] == names[1]
        assert state.param_index_to_name_tp_group[1][0] in named
        master = run.optimizer.master_distribution_axis
        assert sorted(map(str, master.values())) == sorted(str(axis) for axis in axes.values())
        return loss

    found = run_ranks(asked, 4, timeout_s=120)
    assert found[0] == found[1] != found[2] == found[3]


def saved_and_resumed(folder: Any, num_stages: int) -> Any:
    """Losses after a partial checkpoint, of the run that goes on and of one that resumes."""
    settings = {"prescaled_batch": True, "partitions": num_stages}
    run = Run("GPT-2", settings)
    run.train(batch(0))
    smp.save_checkpoint(
        folder, tag="one", partial=True, model=run.model, optimizer=run.optimizer, user_content={"steps": 1}
    )
    smp.save_checkpoint(folder, tag="full", partial=False, model=run.model)
    smp.save(run.model.local_state_dict(), str(folder / "by_hand.pt"), partial=True)
    smp.save(run.optimizer.local_state_dict(), str(folder / "optimizer.pt"), partial=True)
    whole, whole_optimizer = run.model.state_dict(), run.optimizer.state_dict()
    going_on = [run.train(batch(index)) for index in (1, 2)]
    for moment in whole_optimizer["state"].values():
        assert moment["exp_avg"].shape == moment["exp_avg_sq"].shape
    shapes = [tuple(moment["exp_avg"].shape) for moment in whole_optimizer["state"].values()]
    # Back to the state before, in the same run.
    run.model.load_state_dict(smp.load(str(folder / "by_hand.pt"), partial=True))
    run.optimizer.load_state_dict(smp.load(str(folder / "optimizer.pt"), partial=True))
    run.plain.load_state_dict(smp.state.module_manager.translate_functions[0][0](whole))
    by_hand = [run.train(batch(index)) for index in (1, 2)]
    run.model.load_state_dict(whole)
    run.optimizer.load_state_dict(whole_optimizer)
    from_whole = [run.train(batch(index)) for index in (1, 2)]
    smp.shutdown()

    smp.init({**QUIET, **TWO, **settings})
    content = smp.resume_from_checkpoint(folder, tag="one")
    resumed = Run("GPT-2", settings, seed=3)
    after = [resumed.train(batch(index)) for index in (1, 2)]
    files = sorted(path.name for path in (folder / "one_partial").iterdir())
    return [[each[0] for each in losses] for losses in (going_on, by_hand, from_whole, after)], (
        content,
        files,
        len(shapes),
    )


def test_partial_checkpoints_go_on_to_the_last_bit(tmp_path):
    found = run_ranks(saved_and_resumed, 4, tmp_path, 2, timeout_s=240)
    for (going_on, *others), (content, files, num_parameters) in found:
        assert all(each == going_on for each in others)
        assert content == {"steps": 1}
        assert num_parameters == 68
        parts = [f"{stage}_{rank}.pt" for stage in range(2) for rank in range(2)]
        assert {f"{kind}_{part}" for kind in ("model", "optimizer") for part in parts} <= set(files)
    # A full one has transformers' names, and the whole tensors.
    torch.manual_seed(0)
    plain = build("GPT-2").double()
    saved = torch.load(tmp_path / "full", weights_only=True)
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }

    def other_degree() -> Any:
        smp.init({**QUIET, "partitions": 2, "microbatches": 2})
        with pytest.raises(CheckpointError, match="tensor_parallel_degree: 2 there, 1 here"):
            smp.resume_from_checkpoint(tmp_path, tag="one")
        with pytest.raises(CheckpointError, match="saved with tensor_parallel_degree 2, and it is 1 now"):
            smp.load(str(tmp_path / "by_hand.pt"), partial=True)
        model = smp.DistributedModel(copy.deepcopy(plain))
        smp.resume_from_checkpoint(tmp_path, tag="full", partial=False)
        return all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())

    assert run_ranks(other_degree, 2, timeout_s=120) == [True] * 2


def test_what_is_not_marked_is_whole_on_every_rank():
    def trained() -> Any:
        from shardwright.torch.tensor_parallel.divided_tensor import whole

        smp.init({**QUIET, **TWO, "prescaled_batch": True})
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        with smp.tensor_parallelism():
            marked = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        plain = nn.Sequential(marked, nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 4))
        expected = copy.deepcopy(plain)
        model = smp.DistributedModel(plain)

        @smp.step
        def train_step(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
        train_step(model, x)
        sum(expected(part).square().mean() / 2 for part in x.split(4)).backward()
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(whole(parameter.grad), expected.get_parameter(name).grad)
        return sorted(n for n, p in model.local_named_parameters() if model.is_distributed_parameter(p))

    for found in run_ranks(trained, 2):
        assert {"0.0.weight", "0.2.weight"} <= set(found)
        assert not any(name.startswith(("1.", "3.")) for name in found)


def test_a_call_outside_of_a_step_is_refused():
    def called() -> Any:
        run = Run("GPT-2", {"prescaled_batch": True})
        with pytest.raises(UsageError, match=r"is called inside a function"):
            run.model(input_ids=batch(0))
        return True

    assert run_ranks(called, 2) == [True] * 2
