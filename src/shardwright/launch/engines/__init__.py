"""Engines, which provide the hosts of a training job: this machine, Slurm, Kubernetes, Ray."""
