"""What replicas share: gradients, buffers, updates."""
