"""The memory of ranks: at its peak, with sharded states, with recomputation."""
