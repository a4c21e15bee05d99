"""``import horovod.tensorflow.keras as hvd``."""

from .. import *  # noqa: F403
from .. import __all__ as _names
from . import callbacks

__all__ = [*_names, "callbacks"]
