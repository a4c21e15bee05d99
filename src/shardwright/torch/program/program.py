"""The program of a rank: what it does at each step of a traced step function.

Every node of the graph has a home (see `homes`). A value is sent once to each other stage that reads it::

      stage 0              stage 1                     instruction on the rank of stage 1
    ┌───────────┐        ┌───────────┐
    │ v0 = wte  │        │           │                  wte, add, h.0:   ELSEWHERE (give deferred tensors)
    │ v1 = add  │        │           │
    │ v2 = h.0  │──v2───▶│ v3 = h.1  │                  h.1:  HERE, with input v2 received: a leaf of autograd
    └───────────┘        └───────────┘
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwright.model_graph import TensorSpec
from shardwright.runtime.assignment import Assignment
from shardwright.runtime.crossings import Crossing, Crossings, crossings_of, gradients_of
from shardwright.runtime.dataflow import Dataflow
from shardwright.torch.program.instructions import Instruction, instructions_of
from shardwright.torch.program.program_checks import (
    check_after_backward,
    check_attributes,
    check_counters,
    check_generators,
    check_lasting_tensors,
    check_python_draws,
    check_replaced_buffers,
    pauses_of,
)
from shardwright.torch.python_state.attribute_use import AttributeUse
from shardwright.torch.randomness.rng import own_generators
from shardwright.torch.tracing.trace_data import Trace

__all__ = ["Program", "build_program", "generators_of"]


@dataclass(slots=True)
class Program:
    """Everything that one pipeline rank needs to run microbatches of one signature.

    Attributes:
        instructions: one for each step of the trace.
        crossings: (source, target) -> values, for all ranks.
        gradients: (target, source) -> values whose gradients go back.
        sends: stage of this rank -> crossings that leave it, by target.
        receives: stage of this rank -> crossings that enter it, by source.
        loss: value given to backward.
        loss_stage: its home.
        backward_at: number of instructions before backward.
        home_of: value -> home stage.
        specs: value -> shape and type.
        stage_ranks: stage -> pipeline rank.
        stages: the stages of this rank, ascending.
        result_values: (position among the leaves of the returned tree, value).
        kept: values that are needed when the backward of their stage has ended.
        read_late: those among them that steps behind ``backward`` read.
        flops: of the forward, all stages together.
        recomputes: the step function itself recomputes activations around units.
        changes_batch: the step function changes tensors of its batch in place.
        temporary_hooks: the step function registers hooks and removes them again.
        state: buffers that the step function changes -> pipeline rank of their home.
        attributes: attributes of modules that it changes.
        read_in: attribute (id of the module, name) that is read before it is written -> how often a
            microbatch has paused on this rank by then.
        draws_of_python: random numbers of Python or NumPy are drawn between units.
        changes_free_tensors: operations that have a place change tensors that every rank has, or read the
            content of buffers: by its arguments alone, an operation cannot be told to be free.
        takes_unknown: microbatches may do free operations that the trace does not have: what they keep for
            later is found by the others in the order of a plain loop. Not where microbatches take turns, and
            not where the backward runs code of the step function again.
        stand_ins: of each value, the one that its stand-in names; None where every rank has the tensor.
        fingerprint: of the traced graph; the same on all ranks.
        repeated_buffers: name of a buffer that ``torch.utils.checkpoint`` changes a second time -> whether
            it is changed just so, once in the forward.
        read_at: the line that reads a value there.
        reads_nothing: no rank reads values in such a microbatch, as far as traces tell.
        as_planned: each parameter that the plan has a stage for is used by these stages alone.
        rank: the pipeline rank of this program.
        ends: the step function goes on behind the last instruction; every rank runs that (see `step_code`).
        displaced: values whose tensor is not in the user's variables, as their stand-ins name them.
        in_shared_memory: values that the step function sees and that share memory, as stand-ins name them.
    """

    instructions: list[Instruction]
    crossings: Crossings
    gradients: Crossings
    sends: Mapping[int, tuple[Crossing, ...]]
    receives: Mapping[int, tuple[Crossing, ...]]
    loss: int | None
    loss_stage: int | None
    backward_at: int | None
    home_of: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    stage_ranks: tuple[int, ...]
    stages: tuple[int, ...]
    result_values: tuple[tuple[int, int], ...]
    kept: frozenset[int]
    read_late: frozenset[int]
    flops: int
    recomputes: bool
    changes_batch: bool
    temporary_hooks: bool
    state: Mapping[str, int]
    attributes: tuple[AttributeUse, ...]
    read_in: Mapping[tuple[int, str], int]
    draws_of_python: bool
    changes_free_tensors: bool
    takes_unknown: bool
    stand_ins: tuple[int | None, ...]
    fingerprint: str
    rank: int
    ends: bool
    displaced: frozenset[int | None]
    in_shared_memory: frozenset[int | None]
    repeated_buffers: Mapping[str, bool] = field(default_factory=dict)
    read_at: str = ""
    reads_nothing: bool = False
    as_planned: bool = True

    @property
    def draws(self) -> bool:
        """Whether a microbatch takes random numbers."""
        return any(instruction.draws for instruction in self.instructions)


def generators_of(programs: Iterable[Program]) -> tuple[torch.Generator, ...]:
    """Generators of the script's own that microbatches draw from, in the same order on all ranks."""
    return own_generators(
        draw for program in programs for instruction in program.instructions for draw in instruction.draws
    )


def build_program(
    trace: Trace,
    assignment: Assignment,
    *,
    rank: int,
    recompute: frozenset[str] = frozenset(),
) -> Program:
    """Makes the program: what a rank computes, sends and receives.

    Args:
        trace: the traced step function.
        assignment: where each of its nodes runs.
        rank: this pipeline rank.
        recompute: labels of the unit calls whose activations are recomputed.
    """
    graph = trace.graph
    homes, stage_ranks = assignment.homes, assignment.stage_ranks
    home_of = tuple(homes[value.producer] for value in graph.values)
    dataflow = Dataflow(trace, homes, home_of)
    crossings = crossings_of(dataflow)
    check_after_backward(trace, homes, home_of)
    if len(stage_ranks) > 1:
        check_lasting_tensors(trace)
        check_replaced_buffers(trace)
    check_counters(trace, homes, stage_ranks)
    check_attributes(trace, homes, stage_ranks)
    check_python_draws(trace, homes, stage_ranks)
    check_generators(trace)
    local = tuple(stage for stage, owner in enumerate(stage_ranks) if owner == rank)
    read_late = _read_after_backward(trace)
    return Program(
        instructions=instructions_of(trace, dataflow, homes, stage_ranks, rank, recompute),
        crossings=crossings,
        gradients=gradients_of(crossings),
        sends={
            s: tuple(c for (a, _), group in sorted(crossings.items()) if a == s for c in group) for s in local
        },
        receives={
            s: tuple(c for (_, b), group in sorted(crossings.items()) if b == s for c in group) for s in local
        },
        loss=graph.loss,
        loss_stage=None if graph.loss is None else home_of[graph.loss],
        backward_at=trace.backward_at,
        home_of=home_of,
        specs=tuple(value.spec for value in graph.values),
        stage_ranks=stage_ranks,
        stages=local,
        result_values=trace.result_values,
        kept=read_late.union(graph.outputs),
        read_late=read_late,
        flops=sum(node.flops for node in graph.nodes),
        recomputes=trace.recomputes,
        changes_batch=trace.changes_batch,
        temporary_hooks=trace.temporary_hooks,
        state={name: stage_ranks[home_of[value]] for value, name in trace.initial.items()},
        attributes=trace.attributes,
        read_in=_read_in(trace, pauses_of(trace, homes, stage_ranks, rank)),
        changes_free_tensors=_changes_free_tensors(trace),
        draws_of_python=bool(trace.python_draws),
        takes_unknown=len(local) == 1 and not trace.recomputes,
        stand_ins=trace.stand_ins,
        fingerprint=graph.fingerprint,
        rank=rank,
        ends=trace.ends,
        read_at=trace.read_at,
        displaced=frozenset(trace.stand_ins[value] for value in dataflow.displaced),
        in_shared_memory=_in_shared_memory(trace),
        repeated_buffers=trace.repeated_buffers,
    )


def _changes_free_tensors(trace: Trace) -> bool:
    graph = trace.graph
    read = {name for node in graph.nodes if node.kind == "op" for name in node.parameters}
    return bool(trace.initial or any(graph.parameters[name].is_buffer for name in read)) or any(
        change.before is None for step in trace.steps for change in (*step.changes, *step.bases)
    )


def _in_shared_memory(trace: Trace) -> frozenset[int | None]:
    """Of values that may be used behind the end of a program, those that are other names of others."""
    seen = trace.graph.outputs if trace.ends else range(len(trace.graph.values))
    names: dict[int, set[int | None]] = {}
    for value in seen:
        names.setdefault(trace.memory[value], set()).add(trace.stand_ins[value])
    return frozenset(name for group in names.values() if len(group) > 1 for name in group)


def _read_in(trace: Trace, pauses: Sequence[int]) -> dict[tuple[int, str], int]:
    reads = {(id(use.module), use.key): use.first_read for use in trace.attributes}
    return {
        place: sum(pause < read.before for pause in pauses)
        for place, read in reads.items()
        if read is not None
    }


def _read_after_backward(trace: Trace) -> frozenset[int]:
    if trace.backward_at is None:
        return frozenset()
    return frozenset(value for step in trace.steps[trace.backward_at :] for value in step.inputs)
