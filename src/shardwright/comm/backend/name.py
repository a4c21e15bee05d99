"""The name of the backend in torch.distributed."""

__all__ = ["BACKEND"]

BACKEND = "shardwright"
