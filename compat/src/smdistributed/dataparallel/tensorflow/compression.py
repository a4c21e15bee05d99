"""Gradients in fewer bits on the way: ``Compression``."""

from typing import Any

import tensorflow as tf


class _Whole:
    """Sends gradients as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What is sent, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, _known: Any) -> Any:
        """What has come back, as the gradient was."""
        return tensor


class _HalfPrecision:
    """Sends gradients of floating-point numbers in 16 bits."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What is sent, and what `decompress` needs to know."""
        return (tf.cast(tensor, tf.float16), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, known: Any) -> Any:
        """What has come back, as the gradient was."""
        return tensor if known is None else tf.cast(tensor, known)


class Compression:
    """How gradients travel."""

    none = _Whole
    fp16 = _HalfPrecision
