"""All ranks as mpi4py has a communicator: ``smp.get_worker_comm()``."""

from typing import Any

from smdistributed.modelparallel.comm import allgather, barrier
from smdistributed.modelparallel.groups import CommGroup
from smdistributed.modelparallel.ranks_of_run import present_run


class WorkerComm:
    """All ranks of the run; methods as in mpi4py, for any object that can be pickled."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return present_run().rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return present_run().mesh.world_size

    def Get_rank(self) -> int:  # noqa: N802
        """This rank, from 0."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        """Number of ranks."""
        return self.size

    def barrier(self) -> None:
        """Waits for all ranks."""
        barrier()

    def Barrier(self) -> None:  # noqa: N802
        """Waits for all ranks."""
        barrier()

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all ranks, by rank."""
        return allgather(sendobj, CommGroup.WORLD)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of one rank, on all."""
        return self.allgather(obj if self.rank == root else None)[root]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks, on one; None on the others."""
        found = self.allgather(sendobj)
        return found if self.rank == root else None


def get_worker_comm() -> WorkerComm:
    """The communicator of all ranks."""
    present_run()
    return WorkerComm()
