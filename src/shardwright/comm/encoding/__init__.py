"""Values and tensors as bytes and back, without running anything."""
