"""What replicas have in common: gradients, buffers, updates."""
