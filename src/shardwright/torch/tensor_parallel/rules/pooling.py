"""Pooling and resampling of images and volumes: samples and channels may be cut."""

from shardwright.torch.tensor_parallel.call import Call, Input
from shardwright.torch.tensor_parallel.form import Form, Letters
from shardwright.torch.tensor_parallel.rules.registry import rule

__all__: list[str] = []

# The number of dimensions in space.
_NAMES = {
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "avg_pool2d": 2,
    "avg_pool3d": 3,
    "_adaptive_avg_pool2d": 2,
    "_adaptive_avg_pool3d": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_nearest3d": 3,
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
    "upsample_trilinear3d": 3,
    "reflection_pad1d": 1,
    "reflection_pad2d": 2,
    "replication_pad1d": 1,
    "replication_pad2d": 2,
    "replication_pad3d": 3,
    "grid_sampler_2d": 2,
}


@rule(*_NAMES, *(f"{name}_backward" for name in _NAMES if name != "grid_sampler_2d"))
def in_space(call: Call) -> Form | None:
    """Each channel of each sample by itself."""
    name = call.name.removesuffix("_backward")
    spatial = _NAMES[name]
    inputs = [one for one in call.arguments.values() if isinstance(one, Input)]
    ndim = inputs[0].ndim
    leading = ndim - spatial
    if leading < 1 or any(one.ndim != ndim for one in inputs) or len(inputs) != len(call.inputs):
        return None
    names: Letters = (*range(leading), *(None for _ in range(spatial)))
    uncut = frozenset[object]()
    if name == "grid_sampler_2d":
        # The grid has a sample, but no channel.
        own: Letters = (0, None, None, None)
        return Form((names, own), (names,), uncut=uncut, fills_all=True)
    sizes = {"input_size": tuple(range(ndim))} if "input_size" in call.arguments else {}
    linear = call.name.endswith("_backward") or not name.startswith(("max_", "adaptive_max"))
    return Form(
        (names,) * len(inputs),
        (names,) * len(call.outputs),
        uncut=uncut,
        terms=((0,),) if linear else (),
        sizes=sizes,
        fills_all=True,
    )
