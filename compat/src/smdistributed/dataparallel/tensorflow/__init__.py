"""The data parallel library for TensorFlow: not there yet."""

raise ImportError(
    "smdistributed.dataparallel.tensorflow is not there yet: this version of shardwright-smdistributed runs "
    "scripts for PyTorch (import smdistributed.dataparallel.torch.torch_smddp). Use the script's PyTorch "
    "version."
)
