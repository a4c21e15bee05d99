"""Graphs and plans a model of any size without running it.

On accelerators PyTorch fuses attention with its dropout, and dropout is one kernel with a mask of a byte per
element. A CPU trace would see scores that no accelerator writes, and masks four times as large: Hugging
Face's GPT-2 took twice the memory.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.errors import PlanError, StalePlanError, UsageError
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan, TensorPrices
from shardwright.planner import (
    Candidates,
    best_of_meshes,
    estimate_profile,
    make_plan,
    meshes,
    microbatch_counts,
)
from shardwright.planner.closed_forms import expected_in_turn, expected_seconds
from shardwright.planner.degrees import with_or_without_sequences
from shardwright.planner.division import Division
from shardwright.planner.fabric import Fabric
from shardwright.planner.profiles import MeasuredProfile
from shardwright.profile import Profile
from shardwright.quantities import format_bytes
from shardwright.torch.attention.kernels import traced_for_accelerators
from shardwright.torch.batch.batch import Arguments, Batch
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.parameters.precision import cast_inputs, low_precision
from shardwright.torch.pytorch.tree import flatten, leaves
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.units.model_traces import most_stages, trace_parts
from shardwright.torch.units.tensor_division import division_of

_DROPOUT = 4  # its position among the arguments of attention


class OnAccelerators(TorchFunctionMode):
    """While it is active, operations that differ there are traced as accelerators compute them."""

    def __init__(self) -> None:
        super().__init__()
        self._attention = ExitStack()

    def __enter__(self) -> Self:
        self._attention.enter_context(traced_for_accelerators())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._attention.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:  # its dropout costs nothing where it is fused
            args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :]) if len(args) > _DROPOUT else args
            kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace:
        return F.dropout(input, p, training, inplace=True)
    return torch.native_dropout(input, p, training)[0]


def trace_model(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    num_stages: int = 2,
    device: torch.device | str = "cpu",
    on_accelerators: bool = False,
    **kwargs: Any,
) -> ModelGraph:
    """Traces one training microbatch of a model on tensors without data.

    Nothing is computed and no memory is taken, so a model of any size can be given, built under
    ``torch.device("meta")``.

    Args:
        model: any module.
        *args: what it is called with; tensors may be on the meta device.
        loss: makes one number of what the model returns; without it, its attribute ``loss``, or the mean of
            its first tensor.
        num_stages: how many stages are thought of, which says how fine the units need to be.
        device: where the units are thought to compute.
        on_accelerators: count operations as accelerators compute them, not as CPUs do.
        **kwargs: what it is called with.

    Returns:
        The units, what flows between them, and what each costs.

    Raises:
        TraceError: the model cannot be traced; the line is named.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(8, 99), torch.nn.ReLU(), torch.nn.Linear(99, 1))
        >>> graph = sw.trace_model(model, torch.empty(2, 8))
        >>> [graph.nodes[call].name for call in graph.calls]
        ['0', '2']
    """
    with OnAccelerators() if on_accelerators else nullcontext():
        return graph_of(model, (args, kwargs), loss=loss, num_stages=num_stages, device=torch.device(device))


def graph_of(
    model: nn.Module,
    arguments: Arguments,
    *,
    loss: Callable[[Any], Tensor] | None,
    num_stages: int,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> ModelGraph:
    """Traces as `trace_model` does, and tells how far it is: see `trace_parts`."""
    batch = Batch(with_data(arguments, device))
    step = step_of(model, loss)
    traces = trace_parts(model, step, {1: batch}, device=device, num_stages=num_stages, progress=progress)
    return traces[1].graph


def plan_model(
    model: nn.Module,
    *args: Any,
    config: Config,
    world_size: int,
    cluster: Cluster,
    measured: MeasuredProfile | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    search_degrees: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **kwargs: Any,
) -> Plan:
    """Plans a training run from earlier measurements, or from FLOPs, bytes and rates."""
    low, arguments = low_precision(config), with_data((args, kwargs), "cpu")
    if low is not None:
        model, arguments = in_precision(model, low), cast_inputs(arguments, low)
    planner = OfflinePlanner(
        model,
        arguments,
        config=config,
        cluster=cluster,
        measured=measured,
        loss=loss,
        progress=progress,
    )
    if not search_degrees:
        return planner.plan(config.resolve_world(world_size))
    grids = meshes(world_size, config, most_tensor=cluster.ranks_per_node)
    return best_of_meshes(grids, planner.plan, expected=planner.expected_seconds(grids))


_ADAM = 2.0  # numbers of state for each number that is updated; in 16 bits, a copy of it, too


def in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model as it trains in 16 bits; its parameters have no data, and take no memory."""
    without_data: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, without_data).to(dtype)


class OfflinePlanner:
    """Plans grids of ranks for one model; traces it once for each number of pipeline ranks."""

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        *,
        config: Config,
        cluster: Cluster,
        measured: MeasuredProfile | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ):
        self._model = model
        self._batch = Batch(arguments)
        self._config = config
        self._cluster = cluster
        self._measured = measured
        self._loss = loss
        self._progress = progress
        self._candidates: dict[tuple[int, bool], Candidates] = {}
        self._traces: dict[tuple[int, bool], Trace] = {}
        self._divisions: dict[tuple[int, int, int, TensorPrices, object], Division] = {}

    def plan(self, mesh: Mesh) -> Plan:
        """The plan for one grid."""
        return with_or_without_sequences(
            self._config, lambda config: self._plan(mesh, config), tensor=mesh.tensor
        )

    def _plan(self, mesh: Mesh, config: Config) -> Plan:
        units = mesh.pipeline, mesh.share > 1
        if units not in self._candidates:
            self._candidates[units] = self._traced(*units)
        plan = make_plan(
            self._candidates[units],
            cluster=self._cluster,
            config=config,
            mesh=mesh,
            optimizer_factor=_ADAM if low_precision(self._config) is None else _ADAM + 1,
            division=self._division(mesh, config, pipeline=mesh.pipeline) if mesh.share > 1 else None,
        )
        notes = self._assumptions(mesh)
        return plan.model_copy(update={"why": (*plan.why, *notes)}) if notes else plan

    def expected_seconds(self, grids: Sequence[Mesh]) -> list[float]:
        """Seconds of each grid by closed forms, from one trace of one size of microbatches."""
        if len(grids) == 1:
            return [0.0]
        return expected_in_turn(grids, self._expected)

    def _expected(self, grids: Sequence[Mesh]) -> list[float]:
        divides = grids[0].tensor > 1
        longest = max(mesh.pipeline for mesh in grids)
        count = self._counts(longest)[0]
        graph = self._graphs(longest, [count], divides=divides)[count]
        of_degrees = {mesh.share: mesh for mesh in grids} if divides else {}
        return expected_seconds(
            graph,
            grids,
            cluster=self._cluster,
            config=self._config,
            samples=self._num_samples,
            profile=self._profile(graph),
            divisions={
                t: self._division(mesh, self._config, pipeline=longest) for t, mesh in of_degrees.items()
            },
        )

    def _division(self, mesh: Mesh, config: Config, *, pipeline: int) -> Division:
        """How the tensor-parallel ranks of a grid share the model, in units for so many pipeline ranks."""
        prices = Fabric(cluster=self._cluster, mesh=mesh).tensor_prices
        key = pipeline, mesh.share, mesh.context, prices, config.sequence_parallel
        if key not in self._divisions:
            self._divisions[key] = division_of(
                self._model,
                self._traces[pipeline, True],
                config=config,
                mesh=mesh,
                prices=prices,
                microbatches=self._counts(pipeline)[0],
            )
        return self._divisions[key]

    def _assumptions(self, mesh: Mesh) -> tuple[str, ...]:
        """The assumptions behind a plan whose profile is of fewer ranks."""
        measured = self._measured
        if measured is None or mesh.world_size <= measured.num_ranks:
            return ()
        hosts = -(-mesh.world_size // self._cluster.ranks_per_node)
        rate = format_bytes(int(self._cluster.inter_node.bandwidth_Bps))
        return (
            f"The profile was measured with {measured.num_ranks} ranks: {mesh.world_size} are taken to be on "
            f"{hosts} such hosts, with {rate}/s between them. Measure on as many to know.",
        )

    @property
    def _num_samples(self) -> int:
        if self._batch.num_samples is None:
            raise PlanError("the batch holds no tensor that can be cut into microbatches.")
        return self._batch.num_samples

    def _counts(self, pipeline: int) -> tuple[int, ...]:
        return microbatch_counts(self._num_samples, config=self._config, pipeline=pipeline)

    def _traced(self, pipeline: int, divides: bool = False) -> Candidates:
        graphs = self._graphs(pipeline, self._counts(pipeline), divides=divides)
        return {m: (graph, self._profile(graph)) for m, graph in graphs.items()}

    def _graphs(
        self, pipeline: int, counts: Sequence[int], *, divides: bool = False
    ) -> dict[int, ModelGraph]:
        """The model in units for so many pipeline ranks, for each number of microbatches."""
        with nullcontext() if self._cluster.cores_per_node else OnAccelerators():
            traces = trace_parts(
                self._model,
                step_of(self._model, self._loss),
                {m: self._batch.split(m)[0] for m in counts},
                device=torch.device("cpu"),
                num_stages=most_stages(self._config, pipeline=pipeline, divides=divides),
                divides=divides,
                progress=self._progress,
            )
        self._traces.setdefault((pipeline, divides), next(iter(traces.values())))
        return {m: trace.graph for m, trace in traces.items()}

    def _profile(self, graph: ModelGraph) -> Profile:
        estimated = estimate_profile(graph, device=self._cluster.device)
        if self._measured is None:
            return estimated
        if graph.model_fingerprint != self._measured.fingerprint:
            raise StalePlanError(
                f"the profile is of a model with fingerprint {self._measured.fingerprint}, but this one has "
                f"{graph.model_fingerprint}: other parameters, or other shapes, types or ties of them. "
                "Measure this one: shardwright profile"
            )
        known = {key: cost for key, cost in self._measured.costs.items() if key in estimated.costs}
        return Profile(costs={**estimated.costs, **known}, device=self._cluster.device.name)


def step_of(model: nn.Module, loss: Callable[[Any], Tensor] | None) -> Callable[..., Tensor]:
    """A training step: the model, the loss, the backward."""

    def step(*args: Any, **kwargs: Any) -> Tensor:
        value = loss_of(model(*args, **kwargs), loss)
        handler = active_handler()
        if handler is not None and value.requires_grad:
            with plain_torch():
                handler.backward(value, None)
        return value

    return step


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        return loss(output)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    for leaf in leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.mean()
    raise UsageError(
        f"the model returns {type(output).__name__} without a tensor of floating-point numbers, so there is "
        "no loss to train it with. Give a function loss that makes one number of what the model returns."
    )


def with_samples(arguments: Arguments, number: int) -> Arguments:
    """A batch of so many samples: those that there are, again and again."""
    size = Batch(with_data(arguments, "cpu")).num_samples
    if size is None:
        raise PlanError("the batch holds no tensor that can be cut into microbatches.")
    again = torch.arange(number) % size

    def of_number(item: Any) -> Any:
        is_cut = isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == size
        return item[again.to(item.device)] if is_cut else item

    items, structure = flatten(arguments)
    args, kwargs = structure.rebuild([of_number(item) for item in items])
    return args, kwargs


def with_data(arguments: Arguments, device: torch.device | str) -> Arguments:
    """Arguments with data: operations between units look at values, so zeros stand for meta tensors."""
    items, structure = flatten(arguments)
    args, kwargs = structure.rebuild([_tensor_with_data(item, device) for item in items])
    return args, kwargs


def _tensor_with_data(item: Any, device: torch.device | str) -> Any:
    if isinstance(item, Tensor) and item.is_meta:
        return torch.zeros(item.shape, dtype=item.dtype, device=device)
    return item
