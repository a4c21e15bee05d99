"""Shardwright inside training loops of other libraries; each needs its own extra.

::

    accelerate.Accelerator ◄── integrations.accelerate.Accelerator      prepare, backward, gather
    transformers.Trainer   ◄── integrations.transformers.Trainer        the whole compute_loss is the step
    lightning's Strategy   ◄── integrations.lightning.ShardwrightStrategy   training_step is the step

``python -m shardwright.integrations script.py`` runs a script that imports the libraries' own names.
"""
