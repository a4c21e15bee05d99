"""Checkpoints on disk: format, commit, verification. Knows no framework.

::

    checkpoints/
      step-00000120/
        manifest.json            size and checksum of every other file, and its own checksum
        tensors.json             where the pieces of every tensor lie, by its full name
        rank-00000.safetensors   pieces that a rank has written
        rank-00000.frozen.safetensors   those of weights that are not trained; a link while they stay
        state.json               everything else
      step-00000140.tmp-1f3a/    a save under way, or what a crash has left of one
"""
