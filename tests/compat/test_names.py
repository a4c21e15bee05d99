"""Every name of the tables of SageMaker's library is there, and what is missing says so."""

import importlib
import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from shardwright.errors import ShardwrightError, UsageError
from smdistributed.modelparallel.torch.exceptions import NotInitializedError

COMMON = """
init is_initialized is_tracing num_microbatches step rank size local_rank local_size mp_rank mp_size dp_rank
dp_size pp_rank pp_size tp_rank tp_size rdp_rank rdp_size get_mp_group get_dp_group get_tp_group
get_world_process_group get_mp_process_group get_dp_process_group get_pp_process_group get_tp_process_group
get_rdp_process_group CommGroup RankType WORLD MP_GROUP DP_GROUP PP_GROUP TP_GROUP RDP_GROUP broadcast send
recv_from allgather barrier dp_barrier mp_barrier core
""".split()
MODELS_AND_OPTIMIZERS = """
DistributedModel DistributedOptimizer model optimizers amp nn state partition set_partition model_creation
delay_param_initialization tensor_parallelism set_tensor_parallelism tp_register tp_register_with_module
set_activation_checkpointing
""".split()
MODEL_MEMBERS = """
__call__ backward partitioned module get_module parameters named_parameters local_parameters
local_named_parameters local_buffers local_named_buffers local_modules local_named_modules state_dict
local_state_dict load_state_dict register_post_partition_hook register_post_step_hook cpu join
register_comm_hook distributed_modules is_distributed_parameter is_distributed_buffer
is_scaled_batch_parameter is_scaled_batch_buffer default_reducer_named_parameters
scaled_batch_reducer_named_parameters virtual_named_parameters to
""".split()
OPTIMIZER_MEMBERS = """
step zero_grad param_groups state add_param_group state_dict local_state_dict load_state_dict orig_state_dict
save_optimizer_backcompat load_optimizer_backcompat overflow loss_scale loss_scaler dynamic_loss_scale
clip_master_grads backward update_master_grads reload_model_params init_master_params master_params_created
master_distribution_axis param_name_to_index fp16_groups fp32_partitioned_groups_flat
""".split()
DISTRIBUTED = """
DistributedModule DistributedLinear DistributedEmbedding DistributedLayerNorm DistributedTransformerLMHead
DistributedTransformer DistributedTransformerLayer DistributedAttentionLayer DistributedTransformerOutputLayer
""".split()
MODULES = {
    "model": ["DistributedModel"],
    "core": ["barrier", "rank", "size"],
    "step": ["StepOutput"],
    "amp": ["GradScaler"],
    "optimizers": ["FusedLAMB", "FusedLamb", "FusedNovoGrad"],
    "nn": ["FusedLayerNorm", "FlashAttentionLayer", "huggingface", *DISTRIBUTED],
    "patches.checkpoint": ["checkpoint", "checkpoint_sequential"],
    "state_mod": ["state"],
    "utils": ["rmsg", "get_distribution_axis"],
    "exceptions": ["UsageError"],
}
FAMILIES = "gpt2 bert roberta gptj gptneo gptneox".split()


@pytest.mark.parametrize("name", [*COMMON, *MODELS_AND_OPTIMIZERS])
def test_every_name_of_the_tables_is_there(name):
    assert hasattr(smp, name)
    assert name in smp.__all__


@pytest.mark.parametrize("name", MODEL_MEMBERS)
def test_every_member_of_the_model_is_there(name):
    assert hasattr(smp.DistributedModel, name)


@pytest.mark.parametrize("name", OPTIMIZER_MEMBERS)
def test_every_member_of_the_optimizer_is_there(name):
    assert hasattr(smp.DistributedOptimizer, name)


@pytest.mark.parametrize("module", MODULES)
def test_names_are_in_the_modules_where_scripts_import_them(module):
    found = importlib.import_module(f"smdistributed.modelparallel.torch.{module}")
    assert [name for name in MODULES[module] if not hasattr(found, name)] == []


def test_all_of_it_is_there_after_one_import():
    """`smp.patches.checkpoint` was only there once something had imported it: here, the tests themselves."""
    names = [f"smp.{module}.{name}" for module in MODULES for name in MODULES[module] if module != "step"]
    script = "\n".join(["import smdistributed.modelparallel.torch as smp", *names])
    subprocess.run([sys.executable, "-c", script], check=True)


def parameters_of(function):
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.name not in ("self", "kwargs", "more")}


def test_the_model_takes_the_arguments_of_the_table():
    found = parameters_of(smp.DistributedModel.__init__)
    assert list(found)[:2] == ["module", "trace_device"]
    assert {name: value for name, value in found.items() if name != "module"} == {
        "trace_device": "gpu",
        "trace_execution_times": False,
        "overlapping_allreduce": True,
        "backward_passes_per_step": 1,
        "average_grads_across_microbatches": True,
        "bucket_cap_mb": 25,
        "trace_memory_usage": False,
        "broadcast_buffers": True,
        "gradient_as_bucket_view": False,
        "find_unused_parameters": False,
    }


def test_the_optimizer_takes_the_arguments_of_the_table():
    found = parameters_of(smp.DistributedOptimizer.__init__)
    assert list(found) == ["optimizer", "static_loss_scale", "dynamic_loss_scale", "dynamic_loss_args"]
    assert list(found.values())[1:] == [1.0, False, None]


@pytest.mark.parametrize("family", FAMILIES)
def test_translators_are_there_under_all_spellings(family):
    module = importlib.import_module(f"smdistributed.modelparallel.torch.nn.huggingface.{family}")
    assert callable(getattr(module, f"translate_state_dict_to_hf_{family}"))
    assert callable(getattr(module, f"translate_hf_state_dict_to_smdistributed_{family}"))
    assert callable(module.translate_hf_state_dict_to_smdistributed)
    older = {
        "gptj": "translate_hf_gptj_state_dict_to_smdistributed",
        "roberta": "translate_state_dict_to_smdistributed",
    }
    assert callable(getattr(module, older.get(family, f"translate_state_dict_to_hf_{family}")))


SIZES = {"num_attention_heads": 32, "attention_head_size": 32, "hidden_size": 1024}
DROPOUTS = {"attention_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
INITIAL = {"initializer_range": 0.02, "use_normal_initialization": False}
NORMS = {"pre_layernorm": False, "post_layernorm": True}
LAYER = {
    **SIZES,
    "intermediate_size": 4096,
    **DROPOUTS,
    "activation": "gelu",
    "layernorm_epsilon": 1e-5,
    **INITIAL,
    "causal_mask_size": None,
    "add_cross_attention": False,
    **NORMS,
}
NEEDED = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("name", "documented"),
    [
        ("DistributedLinear", {"in_features": NEEDED, "out_features": NEEDED}),
        (
            "DistributedEmbedding",
            {
                "num_embeddings": NEEDED,
                "embedding_dim": NEEDED,
                "padding_idx": None,
                "max_norm": None,
                "norm_type": 2.0,
                "scale_grad_by_freq": False,
                "sparse": False,
                "_weight": None,
                "initializer_range": 0.02,
                "_skip_allgather": False,
                "_skip_scatter_and_merge": False,
            },
        ),
        (
            "DistributedAttentionLayer",
            {
                **SIZES,
                **DROPOUTS,
                "layernorm_epsilon": 1e-5,
                **INITIAL,
                "cross_attention": False,
                "causal_mask_size": None,
                **NORMS,
            },
        ),
        (
            "DistributedTransformerOutputLayer",
            {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "hidden_dropout_prob": 0.1,
                "activation": "gelu",
                "layernorm_epsilon": 1e-5,
                **INITIAL,
                **NORMS,
                "fp32_residual_addition": False,
            },
        ),
        ("DistributedTransformerLayer", {**LAYER, "use_alibi": False, "alibi_bias_max": 8}),
        ("DistributedTransformer", {"num_layers": 12, **LAYER}),
        (
            "DistributedTransformerLMHead",
            {
                "num_layers": 12,
                **SIZES,
                "intermediate_size": 4096,
                "vocab_size": 30522,
                "num_positions": 1024,
                **DROPOUTS,
                "activation": "gelu",
                "layernorm_epsilon": 1e-5,
                "num_token_types": 0,
                "causal_mask_size": None,
                "add_cross_attention": False,
                "add_lm_head": True,
                **INITIAL,
                **NORMS,
            },
        ),
    ],
)
def test_distributed_modules_take_the_arguments_of_the_table(name, documented):
    found = parameters_of(getattr(smp.nn, name).__init__)
    assert list(found.items())[: len(documented)] == list(documented.items())
    assert issubclass(getattr(smp.nn, name), smp.nn.DistributedModule)


def test_errors_are_found_where_the_toolkit_looks():
    for name in ("backend.exceptions", "torch.exceptions"):
        module = importlib.import_module(f"smdistributed.modelparallel.{name}")
        kinds = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
        assert len(kinds) >= 5
        assert all(issubclass(kind, ShardwrightError) for kind in kinds)


WITHOUT_INIT = {
    "rank": lambda: smp.rank(),
    "dp_size": lambda: smp.dp_size(),
    "groups": lambda: smp.get_mp_group(),
    "process groups": lambda: smp.get_dp_process_group(),
    "barrier": lambda: smp.barrier(),
    "objects": lambda: smp.allgather(1, smp.WORLD),
    "settings": lambda: smp.state.cfg.fp16,
    "microbatches": lambda: smp.num_microbatches(),
    "models": lambda: smp.DistributedModel(nn.Linear(2, 2)),
    "optimizers": lambda: smp.DistributedOptimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)])),
    "steps": lambda: smp.step(lambda x: x)(torch.ones(2)),
    "partition": lambda: smp.partition(0).__enter__(),
    "set_partition": lambda: smp.set_partition(nn.Linear(2, 2), 0),
    "creation": lambda: smp.model_creation().__enter__(),
    "delayed": lambda: smp.delay_param_initialization().__enter__(),
    "tensor parallelism": lambda: smp.tensor_parallelism().__enter__(),
}


@pytest.mark.parametrize("use", WITHOUT_INIT)
def test_a_script_that_never_calls_init_is_told_so(use):
    assert not smp.is_initialized()
    with pytest.raises(NotInitializedError, match=r"smp\.init\(\) was not called"):
        WITHOUT_INIT[use]()


def test_what_is_registered_is_checked():
    @smp.tp_register(smp.nn.DistributedTransformerLayer, init_hook=lambda *args: (args, {}))
    class Block(nn.Module):
        def forward(self, hidden_states, attention_mask):
            return hidden_states, attention_mask

    assert isinstance(Block(), Block)
    smp.tp_register_with_module(Block, smp.nn.DistributedTransformerLayer)
    with pytest.raises(UsageError, match="is no distributed module"):
        smp.tp_register_with_module(Block, nn.Linear)
    with pytest.raises(UsageError, match="it is a function"):
        smp.tp_register_with_module(Block, smp.nn.DistributedLinear, init_hook=3)


def test_ranks_in_messages_and_axes():
    assert smp.utils.rmsg("hello") == "hello"
    assert smp.utils.get_distribution_axis(torch.zeros(2)) is None
