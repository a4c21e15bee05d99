"""SageMaker's model parallel library (SMP v1), over Shardwright.

``import smdistributed.modelparallel.torch as smp``
"""

__all__ = ["__version__"]

# Scripts and transformers compare it: features of 1.10 and later are asked for by this number alone.
__version__ = "1.15.0"
