"""How the ranks of a run come together: the store, the group of all, its session."""
