"""A small part of Horovod's names, over Shardwright: see `smdistributed.horovod`."""

__all__ = ["__version__"]

# The release whose names these are.
__version__ = "0.28.1"
