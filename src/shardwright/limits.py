"""Upper limits of requests: anything beyond is a typo, and would take hours or all memory."""

__all__ = [
    "MOST_BYTES",
    "MOST_DIMS",
    "MOST_ELEMENTS",
    "MOST_MICROBATCHES",
    "MOST_NODES",
    "MOST_RANKS",
    "MOST_RANKS_OF_HOST",
    "MOST_RESTARTS",
    "MOST_SECONDS",
    "MOST_STAGES_OF_RANK",
    "MOST_STEPS",
    "MOST_TIMES",
    "MOST_UNITS",
]

MOST_RANKS = 1_000_000
MOST_DIMS = 64  # of a tensor
MOST_NODES = 100_000
MOST_RANKS_OF_HOST = 4096
MOST_MICROBATCHES = 100_000
MOST_STAGES_OF_RANK = 10_000
MOST_RESTARTS = 1_000_000
MOST_STEPS = 10**15
MOST_UNITS = 100_000
MOST_ELEMENTS = 10**15  # of parameters
MOST_BYTES = 2**60
MOST_TIMES = 1e9  # as fast, or as slow

MOST_SECONDS = 1e6
"""Of a timeout: eleven days. What waits counts milliseconds in 32 bits, which end soon after."""
