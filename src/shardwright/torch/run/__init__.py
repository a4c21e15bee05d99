"""The run: settings, ranks, groups, machine, data, and joint calls of the ranks."""
