"""CPU mode: runs scripts written for CUDA on a machine without a GPU.

::

    shardwright run --device cpu -n 2 train.py
    mpirun -np 2 python -m shardwright.cpu_mode train.py          the same under any launcher

It is a shim over PyTorch's Python names, installed only on request and before the script starts. A request
for a CUDA device gets the CPU; a query about CUDA sees one device for each rank of the host.

::

    torch.cuda.*            cuda_functions, streams
    device="cuda:1", 0      tensors, modules
    autocast, GradScaler    mixed_precision
    "nccl", device_ids      modules, processes
    profile(activities)     profilers
    DataLoader, processes   modules, processes

``torch.device("cuda")`` objects stay what they are, so that a script that checks ``device.type`` goes its
usual way. They are translated where a tensor, a generator or a group would be placed there.
"""

from shardwright.cpu_mode.activation import enable, is_enabled

__all__ = ["enable", "is_enabled"]
