"""The backward of a unit: recomputed, or split in two."""
