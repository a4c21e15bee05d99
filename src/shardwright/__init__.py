"""Shardwright: train models too big or too slow for one device.

``import shardwright`` loads no framework. The PyTorch front end is ``shardwright.torch``.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
