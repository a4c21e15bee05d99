"""``smp.nn``: modules of the library.

Modules that several ranks would share are not there yet: their names are, and creating one says so.
"""

from torch.nn import LayerNorm as FusedLayerNorm

from smdistributed.modelparallel.torch.nn import huggingface
from smdistributed.modelparallel.torch.nn.distributed import (
    DistributedAttentionLayer,
    DistributedEmbedding,
    DistributedLayerNorm,
    DistributedLinear,
    DistributedModule,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
)
from smdistributed.modelparallel.torch.nn.flash_attention import FlashAttentionLayer

# PyTorch's own is fused, and layers of Hugging Face's models are of this class: scripts look for it to leave
# their weights out of weight decay.

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
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "huggingface",
]
