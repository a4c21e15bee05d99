"""The machines as a pipeline sees them: links, sums over replicas."""
