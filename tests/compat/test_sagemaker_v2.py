"""The names of SMP v2: how `torch.sagemaker` comes in, its settings, ranks and refusals."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from shardwright.errors import CheckpointError, ConfigError, UsageError
from shardwright.testing import run_ranks
from smdistributed import sagemaker


@pytest.fixture
def tsm(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    sagemaker.provide()
    import torch.sagemaker

    yield torch.sagemaker
    for name in [name for name in sys.modules if name.startswith("torch.sagemaker")]:
        del sys.modules[name]  # cloudpickle would have ranks import what is there
    del torch.sagemaker


def test_the_name_comes_in_when_somebody_asks_for_it(tmp_path, monkeypatch):
    file = tmp_path / "shardwright-torch-sagemaker.pth"
    monkeypatch.setattr(sagemaker, "_path", lambda: file)
    assert "was written" in sagemaker.install()
    code = (
        f"import site, sys; site.addsitedir({str(tmp_path)!r}); assert 'torch' not in sys.modules\n"
        "import torch.sagemaker as tsm\n"
        "from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save\n"
        "assert not tsm.is_initialized() and tsm.grad_norm.clip_grad_norm_\n"
        "from torch.sagemaker import state; assert tsm.state_handler.state is state\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert "was removed" in sagemaker.uninstall()
    assert "nothing to do" in sagemaker.uninstall()


@pytest.mark.parametrize(
    ("asks", "remedy"),
    [
        ("import torch.sagemaker.nn.rotary", r"torch.sagemaker.nn.rotary is not here.*attn_implementation"),
        ("from torch.sagemaker.nn.attn import FlashSelfAttention as F; F(scale=1.0)", r"attn_implementation"),
        (
            "from torch.sagemaker.tensor_parallel.transformer import TransformerLayer as Layer\n"
            "assert not isinstance(3, Layer)\nLayer()",
            r"transformer.TransformerLayer is not here.*auto_wrap_policy",
        ),
        ("from torch.sagemaker.moe.moe_layer import MoELayer; MoELayer()", r"leave config= out"),
        (
            "from torch.sagemaker.distributed.checkpoint.s3_filesystem import S3FileSystem, is_s3_uri\n"
            "assert not is_s3_uri('/data'); S3FileSystem()",
            r"Write to a folder",
        ),
        ("import torch.sagemaker as tsm; tsm.nn.later", r"attn_implementation"),
        ("from torch.sagemaker.grad_norm import clip_it", r"grad_norm.clip_it is not here"),
        ("from torch.sagemaker import of_later", r"compat/README.md lists its names"),
        ("import torch.sagemaker as tsm; tsm.state.tp_rank", r"tp_rank is known after tsm.init\(\)"),
        ("import torch.sagemaker as tsm; tsm.transform(None)", r"Call tsm.init\(\) first"),
    ],
)
def test_a_name_that_is_not_here_says_what_to_do(tsm, asks, remedy):
    with pytest.raises(UsageError, match=remedy):
        exec(asks)


def _refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _settings():
    sagemaker.provide()
    import torch.sagemaker as tsm
    from torch.sagemaker.moe.moe_config import MoEConfig

    refused = {"tensor_parallel_degree": 2}, {"activation_loading_horizon": -1}, {"allow_empty_shards": 1}
    refusals = [_refused(tsm.init, given) for given in refused]
    with pytest.warns(UserWarning, match="Did you mean hybrid_shard_degree"):
        tsm.init({"hybrid_shard_degree": 1, "hybrid_shard_degre": 2})
    state = tsm.state
    refusals.append(_refused(tsm.transform, nn.Linear(2, 2), config=MoEConfig()))
    found = state.hybrid_shard_degree, state.global_rank, state.tp_size, state.ranker.get_rep_groups()
    return refusals, found, state.ranker.get_rep_rank(3), torch.distributed.get_world_size()


def test_settings_and_ranks():
    environ = {"SM_HP_MP_PARAMETERS": '{"hybrid_shard_degree": 2}'}
    given = run_ranks(_settings, 4, env=environ)
    for rank, (refusals, found, replica, size) in enumerate(given):
        assert found == (2, rank, 1, [[0, 2], [1, 3]])  # the variable overrides what the script gives
        assert (replica, size) == (1, 4)
        tensor, horizon, empty, mixture = refusals
        assert tensor.startswith(f"{ConfigError.__name__}: tensor_parallel_degree is 2")
        assert "sw.DistributedModel" in tensor
        assert "activation_loading_horizon is -1, but it must be a number from 0" in horizon
        assert "allow_empty_shards is 1, but it must be true or false" in empty
        assert "Leave config= out" in mixture


def _degree_3():
    sagemaker.provide()
    import torch.sagemaker as tsm

    return _refused(tsm.init, {"hybrid_shard_degree": 3})


def test_a_degree_that_does_not_divide():
    (text, _) = run_ranks(_degree_3, 2)
    assert "hybrid_shard_degree(3) must divide the number of ranks, but 2 are running" in text


def _from_rank_0(folder):
    sagemaker.provide()
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from torch.sagemaker.distributed.checkpoint import state_dict_loader, state_dict_saver

    tsm.init({"hybrid_shard_degree": 2})
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)

    def build():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        return model

    with torch.device("cpu" if rank == 0 else "meta"):
        model = build()
    tsm.transform(model, load_state_dict_from_rank0=True, dtype=torch.float64)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    is_tied = model[2].weight is model[0].weight

    with torch.device("meta"):
        delayed = build()
    initer = DelayedParamIniter(delayed)
    with initer.validate_params_and_buffers_inited():
        wrapped = FullyShardedDataParallel(
            delayed, device_id=torch.device("cpu"), param_init_fn=initer.get_param_init_fn()
        )
    state_dict_saver.save({"step": 3}, checkpoint_id=folder)
    other = {"step": 0, "more": torch.zeros(2)}
    missing = _refused(state_dict_loader.load, other, checkpoint_id=folder)
    state_dict_loader.load(other, checkpoint_id=folder, check_keys_matched=False)
    s3 = _refused(state_dict_saver.save, {}, checkpoint_id="s3://bucket/folder")
    return values, is_tied, initer.count_num_params(), missing, other["step"], s3, wrapped.rank


def test_values_of_rank_0_and_delayed_parameters(tmp_path):
    given = run_ranks(_from_rank_0, 2, str(tmp_path / "saved"))
    first = given[0][0]
    for rank, (values, is_tied, count, missing, step, s3, shard) in enumerate(given):
        assert is_tied
        assert count == 9 + 3 + 6 + 3
        assert values["0.weight"].dtype == torch.float64
        assert all(torch.equal(values[key], first[key]) for key in first)
        assert missing.startswith(f"{CheckpointError.__name__}: ")
        assert "Missing key" in missing
        assert (step, shard) == (3, rank)
        assert "Write to a folder" in s3


class _Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def test_a_module_that_nothing_initialises(tsm):
    from torch.sagemaker.delayed_param import DelayedParamIniter

    with torch.device("meta"):
        module = _Unknown()
    initer = DelayedParamIniter(module)
    check = initer.validate_params_and_buffers_inited()
    with pytest.raises(UsageError, match="scale: still on the meta device"), check:
        pass
    with pytest.raises(UsageError, match="scale of _Unknown: nothing initialises it"):
        initer.get_param_init_fn()(module)
    with torch.device("meta"):
        module = _Unknown()
    DelayedParamIniter(module, lambda module: module.scale.fill_(2)).get_param_init_fn()(module)
    assert module.scale.tolist() == [2, 2]


def _replicas():
    from shardwright import cpu_mode

    cpu_mode.enable(says_so=False)
    sagemaker.provide()
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.delayed_param import DelayedParamIniter

    tsm.init({"hybrid_shard_degree": 2})
    torch.manual_seed(torch.distributed.get_rank())
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    init = DelayedParamIniter(model).get_param_init_fn()
    model = FullyShardedDataParallel(model, device_id=torch.device("cuda", 0), param_init_fn=init)
    return [parameter.tolist() for parameter in model.parameters()]


def test_replicas_begin_alike_whatever_their_seeds():
    """Two replicas of two shards."""
    first, second, third, fourth = run_ranks(_replicas, 4)
    assert first == third
    assert second == fourth
    assert first != second


def _other_states(folder):
    sagemaker.provide()
    import torch.sagemaker as tsm
    from torch.sagemaker.distributed.checkpoint import state_dict_loader, state_dict_saver

    tsm.init()
    found = []
    for group in (
        None,
        torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True),
    ):
        place = f"{folder}/{'all' if group is None else torch.distributed.get_rank()}"
        of_schedule = {"last_epoch": 5, "rates": [0.5], "more": {"kind": "cosine", "seen": torch.ones(2)}}
        state_dict_saver.save({"schedule": of_schedule, "steps": 7}, checkpoint_id=place, process_group=group)
        read = {
            "schedule": {"last_epoch": 0, "rates": [], "more": {"kind": "", "seen": torch.zeros(2)}},
            "steps": 0,
        }
        state_dict_loader.load(read, checkpoint_id=place, process_group=group)
        found.append(str(read) == str({"schedule": of_schedule, "steps": 7}) or str(read))
    return found


def test_states_of_schedules_come_back(tmp_path):
    """In folders of one shard, numbers inside of dictionaries stayed as they were."""
    assert run_ranks(_other_states, 2, str(tmp_path)) == [[True, True]] * 2
