"""Where the hosts of a training job come from: this machine, Slurm, Kubernetes, Ray."""
