"""The run: settings, ranks, groups, machine, data, and what ranks do together."""
