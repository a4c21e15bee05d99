"""SageMaker's data parallel library (SMDDP), over Shardwright."""
