"""How ranks find each other and talk: the environment, process groups, messages.

Import the modules themselves; `shardwright.comm.identity.environment` needs no torch.
"""
