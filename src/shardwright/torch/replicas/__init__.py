"""Gradients, buffers and updates that replicas have in common."""
