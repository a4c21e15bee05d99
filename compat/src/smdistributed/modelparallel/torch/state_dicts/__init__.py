"""``state_dict`` and its relatives, of the wrapped model and of the wrapped optimizer."""
