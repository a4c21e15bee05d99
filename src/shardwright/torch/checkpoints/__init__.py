"""Checkpoints of PyTorch models, in the format of `shardwright.checkpoint`."""
