"""Options that do not go together, or that a transport lacks: which one, and what to do."""

import pytest
import torch
import torch.distributed as dist
from stacks import train as squares
from torch import nn

import shardwright.torch as sw
from choices import some_combinations
from shardwright.testing import RanksFailedError, run_ranks

QUIET = {"run_dir": "off", "profile": "estimated"}
DEGREE_2 = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}


class Scaled(nn.Module):
    """Has a frozen number of some type beside what is trained."""

    def __init__(self, scale):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x):
        return self.layer(x) * self.scale.abs().float().mean()


def train_once(settings, make_model):
    """The loss of a second step."""
    sw.init({**QUIET, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(make_model())
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = sw.step(squares)
    for _ in range(2):
        loss = train(model, torch.ones(4, 4)).reduce_mean()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def refused(settings, make_model=lambda: nn.Linear(4, 4), *, ranks=2, **more):
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(train_once, ranks, settings, make_model, **more)
    return str(caught.value)


@pytest.mark.parametrize("has_group", [True, False])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_gpus(has_group):
    """Where the script had made a group of gloo, that was used without a word."""
    text = refused({"ddp_dist_backend": "nccl"}, init_process_group=has_group)
    assert "ConfigError: ddp_dist_backend is nccl, which sends what GPUs hold, but torch" in text
    assert "Set ddp_dist_backend auto" in text


def test_another_backend_than_the_scripts_own_group(monkeypatch):
    from shardwright.errors import ConfigError
    from shardwright.run.joining import _check_backend

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    with pytest.raises(ConfigError, match=r"is gloo, but the script has made a process group of nccl"):
        _check_backend("gloo", torch.device("cpu"))
    _check_backend("auto", torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "dtype"),
    some_combinations([{"data_parallel_degree": 2}, DEGREE_2], [torch.float8_e4m3fn, torch.int16]),
)
def test_a_type_that_gloo_lacks(settings, dtype):
    """What came was "Invalid scalar type". Shardwright's own collectives send every type."""

    def make_model():
        return Scaled(torch.ones(6, 2).to(dtype))

    assert len(run_ranks(train_once, 2, settings, make_model)) == 2
    for lacking in ({"ddp_dist_backend": "gloo"}, {"shared_memory": False}):
        text = refused({**settings, **lacking}, make_model)
        assert f"UsageError: scale is {dtype}" in text
        assert "gloo, which lacks this type. Leave out ddp_dist_backend and shared_memory" in text


@pytest.mark.parametrize("setting", ["bf16", "fp16"])
def test_complex_parameters_in_16_bits(setting):
    """They lost their imaginary parts."""
    text = refused({setting: True}, lambda: Scaled(torch.ones(2, dtype=torch.complex64)), ranks=1)
    assert "UsageError: scale is torch.complex64, and bf16 and fp16 cast real numbers only" in text


def wrap_while_building():
    sw.init({**QUIET, **DEGREE_2})
    with sw.delay_param_initialization():
        sw.DistributedModel(nn.Linear(200, 200))


def test_a_model_that_is_wrapped_while_it_is_built():
    """What came was "Cannot set version_counter for inference tensor"."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(wrap_while_building, 2)
    assert "UsageError: the model is wrapped inside of sw.delay_param_initialization()" in str(caught.value)
    assert "behind the with statement" in str(caught.value)


def sum_of_float8():
    import shardwright.torch  # noqa: F401  (makes the backend known)

    group = dist.new_group(backend="shardwright")
    dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn), group=group)


def test_sums_of_float8():
    """What came was that "add_stub" is not implemented, in the middle of the collective."""
    with pytest.raises(RanksFailedError, match=r"float8_e4m3fn cannot be reduced\. Cast them"):
        run_ranks(sum_of_float8, 2)


def test_a_stage_of_one_row_beside_a_pipeline():
    settings = {**DEGREE_2, "pipeline_parallel_degree": 2, "microbatches": 2}

    def make_model():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 1, bias=False))

    (expected,) = run_ranks(train_once, 1, {}, make_model)
    assert run_ranks(train_once, 4, settings, make_model) == pytest.approx([expected] * 4)
