"""The model parallel library for TensorFlow: not there yet."""

raise ImportError(
    "smdistributed.modelparallel.tensorflow is not there yet: this version of shardwright-smdistributed runs "
    "scripts for PyTorch (import smdistributed.modelparallel.torch as smp). Use the script's PyTorch version."
)
