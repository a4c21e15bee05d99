"""``smp.nn``: modules of the library."""

from torch.nn import LayerNorm as FusedLayerNorm

from smdistributed.modelparallel.torch.nn import distributed, huggingface
from smdistributed.modelparallel.torch.nn.distributed import *  # noqa: F403
from smdistributed.modelparallel.torch.nn.flash_attention import FlashAttentionLayer

# PyTorch's own is fused, and layers of Hugging Face's models are of this class: scripts look for it to leave
# their weights out of weight decay.

__all__ = [*distributed.__all__, "FlashAttentionLayer", "FusedLayerNorm", "huggingface"]
