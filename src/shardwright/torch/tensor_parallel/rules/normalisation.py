"""Norms: the dimensions that are averaged over stay whole."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut, Placement
from shardwright.torch.tensor_parallel.call import Call, Input
from shardwright.torch.tensor_parallel.divided_tensor import whole
from shardwright.torch.tensor_parallel.form import Candidate, Form, candidates_of
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.redistribution import own_part, replaced
from shardwright.torch.tensor_parallel.rules.registry import rule

__all__: list[str] = []


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> Form:
    """Rows may be cut."""
    data = call.inputs[0]
    num_rows = data.ndim - len(call["normalized_shape"])
    names = tuple(range(data.ndim))
    rows = names[:num_rows]
    statistics = (*rows, *(None for _ in names[num_rows:]))
    inputs = (names, *(names[num_rows:] for _ in call.inputs[1:]))
    outputs = (names, *(statistics for _ in call.outputs[1:]))
    return Form(inputs, outputs, uncut=frozenset(names[num_rows:]))


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def gradient_of_layer_norm(call: Call) -> Form:
    """Gradients of weight and bias are sums over the rows."""
    data = call["input"]
    num_rows = data.ndim - len(call["normalized_shape"])
    names = tuple(range(data.ndim))
    rows, normalised = names[:num_rows], names[num_rows:]
    statistics = (*rows, *(None for _ in normalised))
    inputs = []
    for name, one in call.arguments.items():
        if isinstance(one, Input):
            of_statistics = name in ("mean", "rstd")
            inputs.append(
                normalised if name in ("weight", "bias") else statistics if of_statistics else names
            )
    return Form(
        tuple(inputs),
        (names, *(normalised for _ in call.outputs[1:])),
        uncut=frozenset(normalised),
        sums=(frozenset(), *(frozenset(rows) for _ in call.outputs[1:])),
        terms=((0,),),
    )


@rule("native_group_norm", "native_group_norm_backward")
def group_norm(call: Call) -> list[Candidate] | None:
    """Samples may be cut, or channels into whole groups."""
    data: Input = call["input"]
    backward = call.name.endswith("_backward")
    cut = next((one.cut for one in call.inputs if one.cut is not None and one.ndim == data.ndim), None)
    if cut is None or cut.dim > 1 or not cut.reaches(call.num_ranks):
        return None
    of_groups = cut
    if cut.dim == 1:
        per_group = data.shape[1] // call["group"]
        found = cut.over(per_group)
        if found is None:
            return None
        of_groups = found
    of_weight: Placement = cut.at(0) if cut.dim == 1 else WHOLE
    inputs: list[Placement] = []
    for name, one in call.arguments.items():
        if isinstance(one, Input):
            of_statistics = name in ("mean", "rstd")
            inputs.append(of_weight if name in ("weight", "bias") else of_groups if of_statistics else cut)
    if backward:
        of_sums: Placement = PARTIAL_SUM if cut.dim == 0 else of_weight
        outputs: tuple[Placement, ...] = (cut, of_sums, of_sums)
    else:
        outputs = (cut, of_groups, of_groups)

    def arguments(rank: int) -> Mapping[str, Any]:
        if cut.dim == 0:
            return {"N": cut.length(rank)}
        return {"C": cut.length(rank), "group": of_groups.length(rank)}

    return [Candidate(tuple(inputs), outputs, arguments, share=1 / call.num_ranks)]


@rule("native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward")
def batch_norm(call: Call) -> list[Candidate]:
    """Channels may be cut. Running statistics that are whole are put together again."""
    data: Input = call["input"]
    names = tuple("c" if dim == 1 else dim for dim in range(data.ndim))
    # In evaluation the saved statistics are empty.
    inputs = tuple(
        names if one.ndim == data.ndim else ("c",) if one.numel else (None,) for one in call.inputs
    )
    is_backward = call.name.endswith("_backward")
    statistics = ("c",) if is_backward or call["training"] else (None,)
    outputs = tuple(names if index == 0 else statistics for index in range(len(call.outputs)))
    form = Form(inputs, outputs, uncut=frozenset(set(names) - {"c"}), fills_all=True)
    found = candidates_of(call, form)
    running = [call[name].index for name in ("running_mean", "running_var") if isinstance(call[name], Input)]
    if is_backward or not call["training"] or any(call.inputs[index].cut for index in running):
        return found
    return [_with_whole_statistics(each, running) for each in found]


def _with_whole_statistics(candidate: Candidate, running: list[int]) -> Candidate:
    """Takes running statistics whole, and leaves them so."""
    inputs = list(candidate.inputs)
    cut = inputs[0]
    for index in running:
        inputs[index] = WHOLE

    def compute(group: TensorGroup, func: Any, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        wholes = args[3:5]
        channels = cut.at(0) if isinstance(cut, Cut) else None
        if channels is None or wholes[0] is None:
            return func(*args, **kwargs)
        parts = [own_part(whole(each), channels, group.rank).clone() for each in wholes]
        results = func(*args[:3], *parts, *args[5:], **kwargs)
        for each, part in zip(wholes, parts, strict=True):
            updated = replaced(
                group, part, shape=each.shape, strides=each.stride(), source=channels, target=WHOLE
            )
            each.copy_(updated)
        return results

    return replace(candidate, inputs=tuple(inputs), compute=compute)
