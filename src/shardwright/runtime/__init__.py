"""What the runtime of every framework stands on: what runs where, what crosses, and the loop over actions."""
