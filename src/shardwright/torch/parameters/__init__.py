"""Parameters and buffers: initial values, placement, and release on ranks that do not hold them."""
