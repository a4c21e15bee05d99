"""`torch.distributed` collectives that the script or its model calls."""
