"""The modules of `torch.sagemaker`, what stands in each, and what to use in place of the rest."""

import importlib
from types import ModuleType
from typing import Any

from shardwright.errors import UsageError

_OURS = "smdistributed.sagemaker."
_ROOT = "torch.sagemaker"
# Module below torch.sagemaker -> our file, and the names in it.
_MODULES: dict[str, tuple[str, str]] = {
    "": ("settings", "init is_initialized state transform"),
    "state_handler": ("settings", "state"),
    "delayed_param": ("delayed_param", "DelayedParamIniter"),
    "grad_norm": ("settings", "clip_grad_norm_"),
    "logger": ("settings", "get_logger"),
    "moe.moe_config": ("settings", "MoEConfig"),
    "utils.process_group_utils": ("settings", "get_global_ranks"),
    "distributed.checkpoint.async_utils": ("checkpoints", "AsyncCallsQueue"),
    "distributed.checkpoint.filesystem": (
        "checkpoints",
        "DistributedFileSystemReader DistributedFileSystemWriter",
    ),
    "distributed.checkpoint.s3_filesystem": ("checkpoints", "is_s3_uri"),
    "distributed.checkpoint.state_dict_loader": ("checkpoints", "load"),
    "distributed.checkpoint.state_dict_saver": ("checkpoints", "async_save maybe_finalize_async_calls save"),
    "distributed.checkpoint.state_dict_utils": (
        "checkpoints",
        "SMStateDictType init_optim_state sm_state_dict_type",
    ),
}
# Scripts import these at their top, whether they use them or not: the first use is refused.
_STAND_INS = {
    "checkpoint.utils": "limit_num_subdirs",
    "context_parallel.utils": "setup_transformer_engine_cp_groups",
    "distributed.checkpoint.s3_filesystem": (
        "S3FileSystem format_s3_path get_s3_region_from_uri parse_s3_uri"
    ),
    "distributed.checkpoint.state_dict_saver": "PyTorchDistSaveShardedStrategy",
    "distributed.checkpoint.state_dict_utils": "compute_auto_checkpoint_interval",
    "distributed.fsdp.checkpoint": "load_model_checkpoint save_model_checkpoint",
    "moe.moe_layer": "MoELayer",
    "nn.attn": "FlashGroupedQueryAttention FlashSelfAttention",
    "nn.huggingface.llama_flashattn": "LlamaFlashAttention",
    "tensor_parallel.transformer": "TETransformerLayer TransformerLayer",
    "utils.module_utils": "empty_module_params move_buffers_to_device",
    "utils.utils": "timeit",
}
_PACKAGES = {
    ".".join(parts[:count])
    for parts in (name.split(".") for name in (*_MODULES, *_STAND_INS))
    for count in range(len(parts))
}
_REMEDIES = {
    "nn": 'Use attn_implementation="sdpa" or "flash_attention_2" in the config of transformers.',
    "tensor_parallel": "Wrap the model's own layers, such as LlamaDecoderLayer, in auto_wrap_policy.",
    "context_parallel": "Use context_parallel_degree of Shardwright: docs/context_parallelism.md.",
    "moe": "The model's own experts and router train as they are: leave config= out of tsm.transform.",
    "distributed.fsdp": "Use torch.sagemaker.distributed.checkpoint, or torch.distributed.checkpoint.",
    "distributed.checkpoint.s3_filesystem": "Write to a folder, and copy it.",
    "checkpoint": "Remove old folders in the script.",
}


class NotHereError(UsageError, ImportError):
    """A module of `torch.sagemaker`, or a name in one, that is not here."""


class NotHereInPackageError(UsageError, AttributeError):
    """A name that is not here, where Python then looks for a module of that name."""


def check_module(fullname: str) -> bool:
    """Whether a module is a package."""
    below = _below(fullname)
    if below not in _MODULES and below not in _STAND_INS and below not in _PACKAGES:
        raise not_here(fullname, below)
    return below in _PACKAGES


def fill(module: ModuleType) -> None:
    """Puts its names into a new module."""
    below = _below(module.__name__)
    file, names = _MODULES.get(below, ("", ""))
    if file:
        ours = importlib.import_module(_OURS + file)
        module.__dict__.update({name: getattr(ours, name) for name in names.split()})

    for name in _STAND_INS.get(below, "").split():
        module.__dict__[name] = _stand_in(name, not_here(f"{module.__name__}.{name}", below))

    def refuse(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        asked = f"{below}.{name}" if below else name
        if (
            asked in _MODULES or asked in _STAND_INS or asked in _PACKAGES
        ):  # tsm.delayed_param without an import of it
            return importlib.import_module(f"{_ROOT}.{asked}")
        error = not_here(f"{module.__name__}.{name}", asked)
        raise NotHereInPackageError(str(error)) if below in _PACKAGES else error

    module.__dict__.update(__getattr__=refuse, __doc__="Names of SMP v2, by Shardwright: compat/README.md.")


def _stand_in(name: str, error: NotHereError) -> type:
    """A class whose calls are refused: scripts also pass it to isinstance and to policies of FSDP."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise error

    return type(name, (), {"__new__": refuse})


def not_here(shown: str, below: str) -> NotHereError:
    """The refusal of a name, with what replaces the nearest part that has a replacement."""
    parts = below.split(".")
    nearest = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    remedy = next((_REMEDIES[part] for part in nearest if part in _REMEDIES), "")
    return NotHereError(
        f"{shown} is not here: this is a part of SMP v2, over PyTorch's FSDP. "
        + (remedy or "compat/README.md lists its names.")
    )


def _below(fullname: str) -> str:
    return fullname.removeprefix(_ROOT).removeprefix(".")
