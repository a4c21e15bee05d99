"""Communication: launch environment, process groups, messages, collectives.

Import the modules themselves; `shardwright.comm.launchers` needs no torch.
"""
