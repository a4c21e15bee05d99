"""The collectives of one group of ranks."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.collectives import Memory, Topology, gather_to_nodes
from shardwright.collectives.choose import GLOO, Choice, Chooser
from shardwright.collectives.prices import Prices
from shardwright.collectives.steps import Routine
from shardwright.comm.collectives.ordered_thread import OrderedThread
from shardwright.comm.collectives.reduction import Reduction, gloo_can, start_gloo
from shardwright.comm.collectives.step_runner import Neighbours, Operation, run_steps
from shardwright.comm.joining.session import Session
from shardwright.errors import UsageError


def check_fit(collective: str, data: Tensor, output: Tensor, num_ranks: int) -> None:
    """Refuses tensors that do not fit a collective."""
    num_outputs = data.numel()
    if collective in ("all_gather", "gather_to_nodes"):
        num_outputs *= num_ranks
    elif collective == "reduce_scatter":
        num_outputs //= num_ranks
    if output.numel() != num_outputs or (collective == "reduce_scatter" and data.numel() % num_ranks):
        raise UsageError(
            f"{collective} over {num_ranks} ranks takes {data.numel()} elements and gives {num_outputs}, "
            f"but the output has {output.numel()}."
        )
    if data.dtype != output.dtype:
        raise UsageError(
            f"{collective}: the input is {data.dtype} and the output {output.dtype}; they must be the same."
        )
    for name, tensor in (("input", data), ("output", output)):
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise UsageError(
                f"{collective}: the {name} must be contiguous and on the CPU, but it has the strides "
                f"{tensor.stride()} and is on {tensor.device}. Pass {name}.contiguous()."
            )


def _count(collective: str, data: Tensor, output: Tensor) -> int:
    """Elements by which a collective is chosen: of a rank's part, or of what all ranks have."""
    return output.numel() if collective == "reduce_scatter" else data.numel()


_SUM = Reduction("SUM")


class Communicator:
    """Collectives among the ranks of a group, over their nodes.

    All ranks ask for the same collectives in the same order. They run on `thread`, where others may be in
    front of them, and return when they are done; one that is not to be waited for is given to
    ``thread.submit``.

    Tensors are contiguous and on the CPU.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_ranks: Sequence[int],
        topology: Topology,
        prices: Prices,
        neighbours: Neighbours | None,
        messages: dist.ProcessGroup | None,
        gloo: dist.ProcessGroup,
        name: str = "group",
        session: Session | None = None,
    ):
        self.rank = rank
        self._world_ranks = world_ranks
        self.topology = topology
        self.thread = OrderedThread(f"shardwright-{name}")
        self.neighbours = neighbours
        self.messages = messages
        self.gloo = gloo
        self._chooser = Chooser(topology, rank, prices)
        self._num_operations = 0
        self._failure: BaseException | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._gathers: dict[tuple[int, ...], Routine] = {}
        self._session = session

    def close(self) -> None:
        """Releases the connections to the other ranks."""
        if self.neighbours is not None:
            self.neighbours.hang_up()

    # ---- collectives ----

    def all_gather(self, output: Tensor, data: Tensor) -> None:
        """Gives every rank the inputs of all."""
        self.run("all_gather", data, output)

    def reduce_scatter(self, output: Tensor, data: Tensor, reduction: Reduction = _SUM) -> None:
        """Gives every rank its part of the sum of all inputs."""
        self.run("reduce_scatter", data, output, reduction)

    def all_reduce(self, data: Tensor, reduction: Reduction = _SUM) -> None:
        """Gives every rank the sum of all inputs, in place."""
        self.run("all_reduce", data, data, reduction)

    def broadcast(self, data: Tensor, source: int) -> None:
        """Gives every rank what one of them has, in place."""
        self.run("broadcast", data, data, source=source)

    def run(
        self,
        collective: str,
        data: Tensor,
        output: Tensor,
        reduction: Reduction = _SUM,
        *,
        source: int = 0,
    ) -> None:
        """Does a collective by its name; those in place have their data as the output."""
        check_fit(collective, data, output, self.topology.num_ranks)
        kind = f"broadcast from {source}" if collective == "broadcast" else collective
        if collective in ("reduce_scatter", "all_reduce"):
            reduction.check(data.dtype)
            kind = f"{collective} {reduction.name}"
        if output.numel():
            self._run_task(kind, lambda: self._do(kind, collective, data, output, reduction, source))

    def start_gloo(
        self,
        group: dist.ProcessGroup,
        collective: str,
        output: Tensor,
        data: Tensor,
        *,
        reduction: Reduction = _SUM,
        source: int = 0,
    ) -> dist.Work | None:
        """Has a group of gloo do a collective where it does that better; None where it does not.

        Nothing of it runs on `thread`: the way over Python takes as long as a small collective.
        """
        check_fit(collective, data, output, self.topology.num_ranks)
        alone = self._failure is None and output.numel() > 0 and reduction.name != "AVG"
        if not alone or not gloo_can(collective, data.dtype, reduction):
            return None
        count = _count(collective, data, output)
        if self._chooser.choice(collective, count, data.element_size()).candidate.name != GLOO:
            return None
        return start_gloo(group, collective, data.view(-1), output.view(-1), reduction, source)

    def gather_to_nodes(self, memory: Tensor, data: Tensor, pieces: Sequence[int]) -> None:
        """Gives every node the pieces that all ranks have of some tensors.

        Nobody reads `memory` meanwhile; when this returns, it is complete for all ranks of the node.
        """
        check_fit("gather_to_nodes", data, memory, self.topology.num_ranks)
        name, data, sizes = "gather_to_nodes", data.detach(), tuple(pieces)
        if sizes not in self._gathers:
            steps = gather_to_nodes(self.topology, self.rank, pieces=sizes)
            self._gathers[sizes] = Routine.of(steps)
        routine = self._gathers[sizes]
        self._run_task(name, lambda: self.run_routine(name, routine, data, memory, shared=memory))

    def share_memory(self, num_bytes: int) -> Tensor:
        """Memory that all ranks see; collective over all of them, on one node; returns (num_bytes,) uint8."""
        neighbours = self.neighbours
        if neighbours is None:
            with torch.inference_mode(False):  # the caller's thread may be another
                return torch.empty(num_bytes, dtype=torch.uint8)
        memory: Tensor = self.thread.run(lambda: neighbours.share(num_bytes))
        return memory

    @property
    def prices(self) -> Prices:
        """The prices by which algorithms are chosen."""
        return self._chooser.prices

    def use(self, prices: Prices) -> None:
        """Chooses by other prices from now on; they must be the same on all ranks."""
        self._chooser = Chooser(self.topology, self.rank, prices)

    def choice(self, collective: str, count: int, itemsize: int) -> Choice:
        """The algorithm for a collective of this size, and why it was chosen."""
        return self._chooser.choice(collective, count, itemsize)

    def run_routine(
        self,
        kind: str,
        routine: Routine,
        data: Tensor,
        output: Tensor,
        reduction: Reduction = _SUM,
        shared: Tensor | None = None,
    ) -> None:
        """Runs steps; collective over all ranks."""
        dtype = str(data.dtype).removeprefix("torch.")
        operation = Operation(self._num_operations, kind, data.numel(), dtype)
        self._num_operations += 1
        memories = {Memory.INPUT: data, Memory.OUTPUT: output}
        if routine.num_scratch:
            memories[Memory.SCRATCH] = self._scratch_for(routine.num_scratch, data.dtype)
        neighbours = self.neighbours if routine.tells else None
        if shared is not None:
            memories[Memory.SHARED] = shared
        if neighbours is not None:
            num_bytes = 0 if shared is not None else routine.num_shared * data.element_size()
            fresh = neighbours.begin(operation, num_bytes)
            memories.setdefault(Memory.SHARED, fresh.view(data.dtype))
        run_steps(
            routine.steps,
            memories,
            messages=self.messages,
            neighbours=neighbours,
            world_ranks=self._world_ranks,
            reduction=reduction,
            what=str(operation),
        )
        if neighbours is not None:
            neighbours.end()

    # ---- how they run ----

    def _run_task(self, kind: str, task: Callable[[], None]) -> None:
        """Runs a collective in its turn; after one that failed, none does."""

        def unless_failed() -> None:
            if self._failure is not None:
                raise UsageError(
                    f"{kind} cannot run: an earlier collective of this group failed on this rank "
                    f"({self._failure}). Make a new process group, or end."
                )
            try:
                task()
            except BaseException as error:
                self._failure = error
                self.close()  # else ranks of this node would wait for the whole timeout
                raise

        self.thread.run(unless_failed)

    def _do(
        self,
        kind: str,
        collective: str,
        data: Tensor,
        output: Tensor,
        reduction: Reduction,
        source: int,
    ) -> None:
        data, output = data.detach().view(-1), output.detach().view(-1)
        count = _count(collective, data, output)
        can = gloo_can(collective, data.dtype, reduction)
        choose = self._chooser.choice if can else self._chooser.own_choice
        choice = choose(collective, count, data.element_size())
        if choice.candidate.name == GLOO:
            start_gloo(self.gloo, collective, data, output, reduction, source).wait()
        else:
            routine = self._chooser.routine(choice, collective, count, source)
            self.run_routine(kind, routine, data, output, reduction)
        reduction.finish(output, self.topology.num_ranks)

    def _scratch_for(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        num_bytes = num_elements * dtype.itemsize
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes].view(dtype)
