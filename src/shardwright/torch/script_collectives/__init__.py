"""Collectives of `torch.distributed` that the script, or its model, calls itself."""
