"""Models as data: known architectures, and those of configuration files; no framework."""

from shardwright.catalogue.architectures import ARCHITECTURES, find_architecture
from shardwright.catalogue.convolutional import CONVOLUTIONAL
from shardwright.catalogue.hugging_face import from_hugging_face
from shardwright.catalogue.layer_chain import Layer, LayerChain
from shardwright.catalogue.transformer import Transformer

__all__ = [
    "ARCHITECTURES",
    "CONVOLUTIONAL",
    "Layer",
    "LayerChain",
    "Transformer",
    "find_architecture",
    "from_hugging_face",
]
