"""Starting the ranks of a run, and telling what became of them.

::

    shardwright run ──► torchelastic's agent ──► one worker supervisor a rank ──► the user's script
     (cli, agent.py)      (from PyTorch)           (worker.py, no torch)

The agent counts restarts and serves the store where ranks meet. The supervisors write the logs, pass
signals on, end what does not end by itself, and note how each rank ended; from their notes comes the
report (`verdict`).

Import the modules themselves: `shardwright.launch.agent` needs torch, and the supervisors start faster
without.
"""
