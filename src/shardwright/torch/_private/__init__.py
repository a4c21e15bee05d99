"""Every use of a private PyTorch interface, with its reason: one file for each part of PyTorch.

Tried on torch 2.13.0. When a new version of torch breaks something, it breaks here.
"""

from shardwright.torch._private.autograd import (
    BackwardHookFunction,
    backward_in_progress,
    behind_inner_backward,
    call_after_backward,
    goes_into_gradients,
    gradient_is_wanted,
    newest_node,
    run_backward,
    running_node,
)
from shardwright.torch._private.compiler import compiler_of, put_compiler_stance
from shardwright.torch._private.fake_tensors import (
    FAKE_FAILURES,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    fake_failures_unlogged,
    fake_mode_is_active,
    new_fake_mode,
    unset_fake_temporarily,
)
from shardwright.torch._private.function_modes import (
    TorchFunctionMode,
    function_mode_depth,
    function_transforms_active,
    outside_of_functions,
    pop_function_mode,
    push_function_mode,
)
from shardwright.torch._private.gradient_norms import norms_of, parameters_to_clip, replace_total_norm
from shardwright.torch._private.modules import (
    BatchNormBase,
    PlainBatchNorm,
    hooks_of_every_module,
    non_persistent_buffers,
    non_persistent_buffers_of,
    num_hooks_registered,
    put_parametrization_cache,
)
from shardwright.torch._private.operators import (
    HigherOrderOperator,
    attention_kernel,
    generator_key,
    is_composite,
    packed_call,
)
from shardwright.torch._private.process_groups import default_group
from shardwright.torch._private.profiling import is_profiled
from shardwright.torch._private.saved_tensors import (
    gradient_transform_active,
    put_saved_tensor_hooks,
    saved_tensor_hooks,
    take_saved_tensor_hooks,
    transforms_beside_hooks,
)
from shardwright.torch._private.storages import (
    StorageWeakRef,
    has_storage,
    memory_of,
    storage_key,
    values_of_sparse,
    weak_storage,
)
from shardwright.torch._private.tensor_classes import (
    change_shape_only,
    disabled_torch_function,
    dtensor_of,
    make_wrapper,
    new_wrapper,
    put_in_place,
    spec_like,
    without_subclass_functions,
)

__all__ = [
    "FAKE_FAILURES",
    "BackwardHookFunction",
    "BatchNormBase",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "PlainBatchNorm",
    "StorageWeakRef",
    "TorchFunctionMode",
    "UnsupportedOperatorException",
    "attention_kernel",
    "backward_in_progress",
    "behind_inner_backward",
    "call_after_backward",
    "change_shape_only",
    "compiler_of",
    "default_group",
    "disabled_torch_function",
    "dtensor_of",
    "fake_failures_unlogged",
    "fake_mode_is_active",
    "function_mode_depth",
    "function_transforms_active",
    "generator_key",
    "goes_into_gradients",
    "gradient_is_wanted",
    "gradient_transform_active",
    "has_storage",
    "hooks_of_every_module",
    "is_composite",
    "is_profiled",
    "make_wrapper",
    "memory_of",
    "new_fake_mode",
    "new_wrapper",
    "newest_node",
    "non_persistent_buffers",
    "non_persistent_buffers_of",
    "norms_of",
    "num_hooks_registered",
    "outside_of_functions",
    "packed_call",
    "parameters_to_clip",
    "pop_function_mode",
    "push_function_mode",
    "put_compiler_stance",
    "put_in_place",
    "put_parametrization_cache",
    "put_saved_tensor_hooks",
    "replace_total_norm",
    "run_backward",
    "running_node",
    "saved_tensor_hooks",
    "spec_like",
    "storage_key",
    "take_saved_tensor_hooks",
    "transforms_beside_hooks",
    "unset_fake_temporarily",
    "values_of_sparse",
    "weak_storage",
    "without_subclass_functions",
]
