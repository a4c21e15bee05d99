"""The torch.distributed backend ``shardwright``."""
