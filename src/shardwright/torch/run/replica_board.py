"""A board, in the job's store, on which the stages of a replica post values for one another."""

from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwright.comm.joining.process_group import default_store
from shardwright.comm.trust.value_board import ValueBoard
from shardwright.torch.run.context import Context

__all__ = ["replica_board"]


def replica_board(context: Context, number: int) -> ValueBoard:
    """The board of this rank's replica, at this rank's place along the tensor axis."""

    def has_ended(rank: int) -> bool:
        local = context.links.local_peers
        if local is not None and rank in local and local.has_ended(rank):
            return True
        return context.watch.blame is not None and context.watch.blame.has_failed(rank)

    store: Any = default_store()  # whose type, as PyTorch declares it, lacks clone()
    name = f"values of replica {context.data_rank}, part {context.tensor_rank}, in run {number}"
    store = PrefixStore(name, store.clone())  # who waits at one keeps others from it
    board = ValueBoard(
        store,
        context.pipeline_ranks,
        rank=context.pipeline_rank,
        has_ended=has_ended,
        timeout_s=context.config.timeout_s,
    )
    assert context.watch.whereabouts is not None
    context.watch.whereabouts.also_tell.append(board.tell)
    return board
