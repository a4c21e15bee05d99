"""The names of SageMaker's distributed training libraries, over Shardwright."""
