"""CPU mode: scripts that are written for CUDA run on a machine without a GPU.

::

    shardwright run --device cpu -n 2 train.py
    mpirun -np 2 python -m shardwright.cpu_mode train.py          the same under any launcher

It is a shim of PyTorch's Python names, put in place before the script starts, and in no other case. What
asks for a CUDA device gets the CPU; what asks about CUDA is told of one device for each rank of the host.

::

    torch.cuda.*            cuda_functions, streams, device_memory, generators
    device="cuda:1", 0      devices, factories, tensors, modules
    autocast, GradScaler    mixed_precision
    "nccl", device_ids      process_groups, synchronised_norms
    profile(activities)     profilers
    DataLoader, processes   data_loading, children

Objects ``torch.device("cuda")`` stay what they are, so that a script that looks at ``device.type`` goes its
usual way: they are translated where a tensor, a generator or a group would be put there.
"""

from shardwright.cpu_mode.activation import enable, is_enabled

__all__ = ["enable", "is_enabled"]
