"""`torch.distributed` collectives that the script or its model calls.

A module written for data parallelism sums over all ranks, each of which has the whole model::

    if dist.is_initialized():
        dist.all_reduce(center)
        center = center / dist.get_world_size()

In a pipeline, not all ranks make such a call: only those with the same unit do, one in each replica. So,
during a trace or a microbatch, a stand-in replaces the default process group. Its ranks are the replicas, its
size is their number, and its messages are its own, so that a call cannot meet one of the library's. Between
units a call is an operation like any other: one stage makes it. In a trace, and while units are timed,
nothing is sent.

Ranks of one stage compute the same actions in the same order, so they make these calls in the same order.

The same holds for the `step` of an optimizer that distributes its work over all ranks and gathers the results
(Muon): other stages have other parameters. Where replicas shard parameters, each sees whole ones, and all of
them make every update: they count as one.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from greenlet import getcurrent
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwright.comm.joining.process_group import default_store
from shardwright.errors import PeerLostError, UsageError
from shardwright.mesh import Axes
from shardwright.run.context import Context, context, is_initialized
from shardwright.torch import sums_over_ranks
from shardwright.torch._private.modules import default_group
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.pytorch.modules import called_from, user_line
from shardwright.torch.pytorch.tree import leaves, map_tree
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor

_CHANGES_ALL = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
"""Methods of a process group that change all of their tensors -> the function that calls them."""

_CHANGES_FIRST = {
    "all_gather_single": "all_gather_into_tensor",
    "all_to_all_single": "all_to_all_single",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "alltoall": "all_to_all",
    "gather": "gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "scatter": "scatter",
}
"""Those that fill their first argument from the second."""

_NAMES = {**_CHANGES_ALL, **_CHANGES_FIRST, "barrier": "barrier"}
_OLDER_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}
_MARK = "refuses_collective"
_OF_OBJECTS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
# Who calls whom: code of these passes on a call of somebody else.
_PASSES_ON = ("torch.", sums_over_ranks.__name__)
# Only scripts call these. Their default group is that of the time at which they are imported: imported here,
# before there is one, they look for it when they are called.
_OF_SCRIPTS = with_gradients.__name__
_HOLDERS: Axes = "rdp"
_QUERIES = ("get_backend", "get_group_rank", "get_rank", "get_world_size", "get_global_rank")

# The stubs leave out the constructor.
_ProcessGroup: Any = dist.ProcessGroup


class _Done:
    """The handle of an asynchronous call that has happened already."""

    def __init__(self, outputs: list[Tensor]):
        self._outputs = outputs

    def result(self) -> list[Tensor]:
        return self._outputs

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(self._outputs)
        return done


class _Replicas(_ProcessGroup):  # type: ignore[misc]
    """In the place of the default process group."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.sends = False  # a microbatch computes, and this is no trace
        self.axes: Axes = _HOLDERS
        self.num_calls = 0
        self.world: Any = None
        self._made: dict[Axes, tuple[Context, Any]] = {}

    def __deepcopy__(self, memo: Any) -> "_Replicas":
        return self

    # ---- what torch.distributed asks a group ----

    def size(self) -> int:
        return context().mesh.group_size(self.axes) if is_initialized() else 1

    def rank(self) -> int:
        return context().mesh.group_rank(self.axes, context().rank) if is_initialized() else 0

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def group_name(self) -> str:
        return "replicas"

    def send(self, *args: Any) -> NoReturn:
        _refuse("a message to one rank (send, recv)", "Use a collective, or send between steps.")

    recv = recv_anysource = send

    def _start_coalescing(self, *args: Any) -> NoReturn:
        _refuse("several collectives in one (coalescing)", "Call them one by one.")

    # ---- calls ----

    def run(self, method: str, args: Sequence[Any]) -> None:
        """Makes a call, or what it leaves in a trace."""
        self.num_calls += 1
        args = map_tree(_own_rows, list(args))
        outputs = _outputs(method, args)
        with torch.no_grad():
            if self.size() == 1:
                _alone(outputs, args[1] if method in _CHANGES_FIRST else ())
            elif not self.sends:
                _touch(outputs)
            else:
                self._send(method, args)

    def _send(self, method: str, args: Sequence[Any]) -> None:
        try:
            work = getattr(self._group(), method)(*args)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            ranks = context().mesh.group(self.axes, context().rank)
            raise PeerLostError(
                f"{user_line()}: {_NAMES[method]}() is called in a step, for which the ranks that hold this "
                f"stage ({', '.join(map(str, ranks))}) wait for one another, and it failed: {error}. Each "
                "replica must make the same calls, in the same order, in each microbatch."
            ) from error

    def _group(self) -> Any:
        """Of the ranks that hold the same stage; made at the first call, by these alone."""
        current, axes = context(), self.axes
        if axes not in self._made or self._made[axes][0] is not current:
            from shardwright.comm.collectives.shardwright_process_group import ShardwrightProcessGroup

            ranks = current.mesh.group(axes, current.rank)
            with default_group(self.world):
                made = ShardwrightProcessGroup(
                    PrefixStore(f"collectives in steps/{next(_NUMBERS)}/{ranks}", default_store()),
                    ranks.index(current.rank),
                    len(ranks),
                    timedelta(seconds=current.config.timeout_s),
                )
            self._made[axes] = current, made
            current.cleanup.callback(self._forget, axes)
        return self._made[axes][1]

    def _forget(self, axes: Axes) -> None:
        self._made.pop(axes)[1].shutdown()


def _call(method: str) -> Callable[..., Any]:
    operation = _OPERATIONS[method]

    def call(self: _Replicas, *args: Any, **kwargs: Any) -> _Done:
        given = [*args, *kwargs.values()]
        if any(called_from("torch.distributed.distributed_c10d", name) for name in _OF_OBJECTS):
            _refuse("a collective of objects", "Use one of tensors, or exchange objects between steps.")
        handler = active_handler()
        if handler is None:
            self.run(method, given)
        else:
            with plain_torch():
                handler.operation(operation, tuple(given), {})
        return _Done(_outputs(method, given))

    return call


def _operation(method: str) -> Callable[..., None]:
    def operation(*args: Any) -> None:
        _REPLICAS.run(method, args)

    operation.__name__ = _NAMES[method]
    return operation


# The number of groups that were made: ranks that make one together have made as many.
_NUMBERS = itertools.count()
_OPERATIONS = {method: _operation(method) for method in _NAMES}
for _name in (*_NAMES, *_OLDER_NAMES):
    setattr(_Replicas, _name, _call(_OLDER_NAMES.get(_name, _name)))
_REPLICAS = _Replicas()

COLLECTIVES = frozenset(_OPERATIONS.values())
"""The functions in a trace in place of calls between units: each is made on one stage."""


@contextmanager
def over_replicas(*, sends: bool, axes: Axes = _HOLDERS) -> Iterator[None]:
    """Inside, collectives of the default process group go over the ranks that hold the same unit."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    before = _REPLICAS.sends, _REPLICAS.axes
    _REPLICAS.sends, _REPLICAS.axes = sends, axes
    try:
        if world is None or world is _REPLICAS:
            yield
            return
        _REPLICAS.world = world
        with default_group(_REPLICAS, on_other=_refuse_other_group, on_functional=_refuse_functional):
            yield
    finally:
        _REPLICAS.sends, _REPLICAS.axes = before


def num_collectives() -> int:
    """The number of calls inside `over_replicas` so far."""
    return _REPLICAS.num_calls


def refusal_behind(error: BaseException | None) -> BaseException | None:
    """The error by which a call was refused here, if that is what has led to another one."""
    while error is not None and _MARK not in vars(error):
        error = error.__context__  # torch.distributed looks up a group's name when it logs an error
    return error


def _own_rows(item: Any) -> Any:
    """This rank's rows of a shared parameter: those that it talks to have the same rows."""
    if isinstance(item, DividedTensor):
        _refuse(
            "a collective of a tensor that ranks share (tensor_parallel_degree)",
            "Keep the parameters of its module whole.",
        )
    return item.local if isinstance(item, ShardedTensor) else item


def _outputs(method: str, args: Sequence[Any]) -> list[Tensor]:
    """The tensors that a call changes."""
    return [t for t in leaves(args[0]) if isinstance(t, Tensor)] if method != "barrier" else []


def _alone(outputs: Sequence[Tensor], inputs: Any) -> None:
    """The result of a collective over a single rank: its own data."""
    for output, own in zip(outputs, (t for t in leaves(inputs) if isinstance(t, Tensor)), strict=False):
        output.copy_(own.view(output.shape) if own.shape != output.shape else own)


def _touch(outputs: Sequence[Tensor]) -> None:
    """Changes tensors without changing them, so that it is seen that they change."""
    for output in outputs:
        output.copy_(output.clone())


def _refuse_other_group(group: Any) -> None:
    """Refuses a process group of the script's own, in which not all ranks may hold the unit that uses it."""
    if is_initialized() and not context().mesh.spreads_model:
        return
    if _REPLICAS.sends and getcurrent().parent is None:
        return  # code of hooks for gradients, and of the library: no microbatch's
    frame = sys._getframe(2)
    if frame.f_code.co_name in _QUERIES:
        return
    name = frame.f_code.co_name
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSES_ON):
        if frame.f_globals["__name__"] == _OF_SCRIPTS:
            break
        frame = frame.f_back
    if not frame.f_globals.get("__name__", "").startswith("shardwright."):
        _refuse(
            f"torch.distributed.{name} of a process group of its own",
            "Leave out the group: in a step, the default one is that of the ranks that hold the same stage.",
        )


def _refuse_functional(group: Any) -> None:
    """Refuses a functional collective: it finds groups by their names, past the stand-in."""
    if is_initialized() and not context().mesh.spreads_model and group is not _REPLICAS:
        return
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    if frame.f_globals.get("__name__") == ShardedTensor.__module__:
        return  # an optimizer looks at all rows of a parameter, which the library gathers
    raise _refusal(
        "a functional collective (torch.distributed._functional_collectives, which DTensor uses) is "
        "called in a step. Call torch.distributed.all_reduce and its like, or "
        "torch.distributed.nn.functional, which has gradients."
    )


def _refuse(what: str, remedy: str) -> NoReturn:
    raise _refusal(
        f"the model, the step function or the optimizer calls {what} in a step. Its ranks hold other parts "
        f"of the model, and need not all come to this line. {remedy}"
    )


def _refusal(text: str) -> UsageError:
    error = UsageError(f"{user_line()}: {text}")
    vars(error)[_MARK] = True
    return error
