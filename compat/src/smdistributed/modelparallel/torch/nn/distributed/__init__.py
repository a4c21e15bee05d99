"""The distributed modules of ``smp.nn``: ordinary modules that know where ranks cut them."""

from smdistributed.modelparallel.torch.nn.distributed.attention import DistributedAttentionLayer
from smdistributed.modelparallel.torch.nn.distributed.base import DistributedModule
from smdistributed.modelparallel.torch.nn.distributed.embedding import DistributedEmbedding
from smdistributed.modelparallel.torch.nn.distributed.layer import DistributedTransformerLayer
from smdistributed.modelparallel.torch.nn.distributed.layer_norm import DistributedLayerNorm
from smdistributed.modelparallel.torch.nn.distributed.linear import DistributedLinear
from smdistributed.modelparallel.torch.nn.distributed.lm_head import DistributedTransformerLMHead
from smdistributed.modelparallel.torch.nn.distributed.output import DistributedTransformerOutputLayer
from smdistributed.modelparallel.torch.nn.distributed.transformer import DistributedTransformer

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
]
