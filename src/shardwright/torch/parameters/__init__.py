"""Parameters and buffers: their first values, their places, and giving up those of other ranks."""
