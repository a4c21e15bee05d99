"""The runtime under every framework: placement, crossings, and the loop over actions."""
