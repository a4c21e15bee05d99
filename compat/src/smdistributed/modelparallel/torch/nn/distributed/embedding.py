"""``smp.nn.DistributedEmbedding``."""

from typing import Any

from torch import Tensor, nn

from shardwright.torch.units.tensor_division import Pin, pin
from smdistributed.modelparallel.torch.nn.distributed.base import DistributedModule
from smdistributed.modelparallel.torch.nn.distributed.first_weights import FirstWeights


class DistributedEmbedding(DistributedModule, nn.Embedding):
    """An embedding, of which each rank has some columns.

    Args:
        _skip_allgather: changes nothing: results have their whole shape, wherever their parts are.
        _skip_scatter_and_merge: changes nothing, for the same reason.
        cut: ``"columns"``, ``"rows"`` (the words of a vocabulary) or ``"none"``.
        first: how its weights begin, in the place of `initializer_range`.
    """

    first = FirstWeights()

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
        *,
        cut: str = "columns",
        first: FirstWeights | None = None,
        device: Any = None,
        dtype: Any = None,
    ):
        # Before the parent's constructor, which fills the weights.
        vars(self)["first"] = FirstWeights(std=initializer_range) if first is None else first
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            _weight=_weight,
            device=device,
            dtype=dtype,
        )
        pin(self, "weight", Pin({"rows": 0, "columns": 1, "none": None}[cut]))

    def reset_parameters(self) -> None:
        """Fills the weight with its first values."""
        if not self.first.fill(self.weight, padding_idx=self.padding_idx):
            super().reset_parameters()
