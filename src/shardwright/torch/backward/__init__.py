"""The backward of a unit: recomputed, or cut in two."""
