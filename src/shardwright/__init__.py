"""Shardwright: train models too big or too slow for one device.

``import shardwright`` loads no framework. The PyTorch front end is ``shardwright.torch``.
"""

from typing import Any

__all__ = ["__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Names that are asked for here and not found, such as init of "import shardwright as sw".
    if name.startswith("_"):
        raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
    raise AttributeError(
        f"shardwright itself has no {name}. Scripts use its front end for PyTorch: "
        "import shardwright.torch as sw"
    )
