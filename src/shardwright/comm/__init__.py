"""Communication: launch environment, process groups, messages, collectives.

Import the modules themselves; `shardwright.comm.identity.environment` needs no torch.
"""
