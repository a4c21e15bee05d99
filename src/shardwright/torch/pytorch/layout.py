"""The order of a tensor's dims in memory: channels last, transposed, ...

Values do not depend on the layout, but random draws do (a dropout mask is filled in memory order), and so
does what code may do with the tensor (`Tensor.view`). So a tensor has the same layout on the receiving rank
as on the sending one: a message has its dims in memory order, from the widest stride to the narrowest::

    channels last    (n, c, h, w), strides (c h w, 1, c w, c)    order (0, 2, 3, 1), sent as (n, h, w, c)
"""

import torch
from torch import Tensor

__all__ = ["Order", "from_memory_order", "in_memory_order", "order_of"]

Order = tuple[int, ...]


def order_of(tensor: Tensor) -> Order | None:
    """Dims from the widest stride to the narrowest; None where they are counted so, or entries share memory.

    >>> order_of(torch.empty(2, 3, 4, 5, memory_format=torch.channels_last))
    (0, 2, 3, 1)
    >>> order_of(torch.empty(2, 3)), order_of(torch.empty(2, 1).expand(2, 3))
    (None, None)
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    sizes, strides = tensor.shape, tensor.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(sizes, strides, strict=True)):
        return None
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], sizes[dim] == 1))
    return None if order == sorted(order) else tuple(order)


def in_memory_order(tensor: Tensor, order: Order | None) -> Tensor:
    """The tensor with its dims in memory order, as it is sent."""
    return tensor if order is None else tensor.detach().permute(order)


def from_memory_order(tensor: Tensor, order: Order | None) -> Tensor:
    """The tensor that was sent, with its dims as they are counted.

    >>> sent = in_memory_order(torch.empty(2, 3, 4, 5, memory_format=torch.channels_last), (0, 2, 3, 1))
    >>> sent.shape, from_memory_order(sent, (0, 2, 3, 1)).stride()
    (torch.Size([2, 4, 5, 3]), (60, 1, 15, 3))
    """
    # Detached: autograd takes it for a tensor of its own, and not for a view.
    return tensor if order is None else tensor.permute([order.index(dim) for dim in sorted(order)]).detach()
