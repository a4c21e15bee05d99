"""``import horovod.keras as hvd``: the same as `horovod.tensorflow.keras`."""

from ..tensorflow.keras import *  # noqa: F403
from ..tensorflow.keras import __all__ as _names
from ..tensorflow.keras import __getattr__  # noqa: F401

__all__ = list(_names)
