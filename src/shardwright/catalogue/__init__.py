"""Models as data: known architectures, and those of configuration files; no framework."""

from shardwright.catalogue.hugging_face import ARCHITECTURES, find_architecture, from_hugging_face
from shardwright.catalogue.transformer import LatentAttention, Layer, LayerChain, Transformer

__all__ = [
    "ARCHITECTURES",
    "LatentAttention",
    "Layer",
    "LayerChain",
    "Transformer",
    "find_architecture",
    "from_hugging_face",
]
