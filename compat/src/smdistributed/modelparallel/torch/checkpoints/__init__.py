"""Checkpoints: ``smp.save_checkpoint`` and ``smp.resume_from_checkpoint``."""
