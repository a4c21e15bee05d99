"""A small part of Horovod's names, over Shardwright: see `smdistributed.horovod`."""

from smdistributed.horovod.not_here import names_not_here as _names_not_here

__all__ = ["__version__"]

# The release whose names these are.
__version__ = "0.28.1"

__getattr__ = _names_not_here(__name__)
