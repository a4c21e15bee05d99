"""The size of a gradient bucket: the bytes reduced in one message."""

__all__ = ["size_of_buckets"]

_LEAST_BUCKETS = 8
_LEAST_BYTES = 2**20


def size_of_buckets(num_bytes: int, *, most: int) -> int:
    """Bytes of a bucket where there are `num_bytes` of gradients.

    What the backward fills last is summed when it has ended, with nothing left to hide it: there are eight
    buckets at least, as long as none has less than a mebibyte.

    >>> [size_of_buckets(n * 2**20, most=25 * 2**20) / 2**20 for n in (4, 40, 4000)]
    [1.0, 5.0, 25.0]
    """
    return min(most, max(_LEAST_BYTES, num_bytes // _LEAST_BUCKETS))
