"""Names of the modules that several ranks would share: not there yet; creating one says so."""

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.exceptions import NotThereYetError

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


class DistributedModule(nn.Module):
    """Base of modules that several ranks share.

    Raises:
        NotThereYetError: one is created.
    """

    _instead = "an ordinary module of PyTorch, or of transformers"

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotThereYetError(
            f"smp.nn.{type(self).__name__} is a module for tensor parallelism, which is not there yet. Use "
            f"{self._instead}, with tensor_parallel_degree 1; pipeline_parallel_degree and "
            "sharded_data_parallel_degree divide its memory over ranks."
        )


class DistributedLinear(DistributedModule):
    """A linear layer of which each rank has some input channels."""

    _instead = "torch.nn.Linear"


class DistributedEmbedding(DistributedModule):
    """An embedding of which each rank has some columns."""

    _instead = "torch.nn.Embedding"


class DistributedLayerNorm(DistributedModule):
    """A normalisation of activations that are spread over ranks."""

    _instead = "torch.nn.LayerNorm"


class DistributedTransformerLMHead(DistributedModule):
    """A transformer with embeddings and a head for language models."""

    _instead = "a model of transformers, such as GPT2LMHeadModel"


class DistributedTransformer(DistributedModule):
    """A stack of transformer layers."""

    _instead = "a model of transformers, or torch.nn.TransformerEncoder"


class DistributedTransformerLayer(DistributedModule):
    """A transformer layer."""

    _instead = "a layer of transformers, or torch.nn.TransformerEncoderLayer"


class DistributedAttentionLayer(DistributedModule):
    """The attention of a transformer layer."""

    _instead = "torch.nn.MultiheadAttention, or smp.nn.FlashAttentionLayer"


class DistributedTransformerOutputLayer(DistributedModule):
    """The feed-forward part of a transformer layer."""

    _instead = "torch.nn.Sequential of two linear layers"
