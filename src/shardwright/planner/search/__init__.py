"""The search for a plan: closed forms over all grids, drafts by the chain DP, simulated options, reasons."""
