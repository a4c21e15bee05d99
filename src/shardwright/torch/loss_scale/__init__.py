"""Loss scaling for 16-bit gradients."""
