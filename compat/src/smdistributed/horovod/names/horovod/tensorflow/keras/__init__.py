"""``import horovod.tensorflow.keras as hvd``."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.horovod.not_here import names_not_here as _names_not_here

from .. import *  # noqa: F403
from .. import Compression, DistributedOptimizer
from .. import __all__ as _names
from . import callbacks

__all__ = [*_names, "callbacks", "load_model"]

__getattr__ = _names_not_here(__name__)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[Any] = (),
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    **options: Any,
) -> Any:
    """Reads a model that ``model.save`` wrote; its optimizer, if it has one, averages over all ranks.

    Args:
        custom_optimizers: classes of a script's own that the file may name.
        options: change nothing.
    """
    known = {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
