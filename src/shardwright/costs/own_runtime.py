"""The measured overheads of Shardwright's runtime. Others are fitted to published runs."""

__all__ = ["ACTION_S", "DIVIDED_OPERATION_S", "OFFLOADED_CALL_S", "OWN", "STEP_S", "UNIT_S"]

ACTION_S = 8e-5
"""Seconds that the runtime itself takes for an action, measured by ``benchmarks/pipeline.py --only E``.

A forward takes about 115 us and a backward 45, sends of small messages included: this is their mean, which
also counts for both parts of a backward that is split.
"""

STEP_S = 4e-3
"""Seconds for which a rank keeps its core busy before the first action of a step and after the last one.

It agrees on the batch, looks at attributes of the model and hands out results: 2.5 ms on a quiet machine, 5
to 7 ms on a slow one, whatever the microbatches and the number of ranks (2 and 4 on two cores).
"""

UNIT_S = 2e-5
"""Seconds that the call of a unit takes however small it is; its backward takes as long again twice."""

DIVIDED_OPERATION_S = 25e-6
"""Seconds that an operation on divided tensors takes beyond its own, where that is not measured.

In a loop of nothing else it is 6 us (``benchmarks/tensor_dispatch.py``). Between the products of a step, that
push its code out of the caches, it is four times as much.
"""

OFFLOADED_CALL_S = 0.7e-3
"""Seconds that a rank takes to hand over what a call of a unit keeps, in its forward; and again to get it.

A transformer's block keeps some 23 tensors in 8 storages, for which the rank's own thread takes 0.45 to
0.6 ms in each direction. The rest is waiting for the thread that copies, which takes Python's lock in turn.
"""

OWN = {"layer_s": 3 * UNIT_S, "microbatch_s": 2 * ACTION_S, "step_s": STEP_S}
"""The same, as parameters of `Efficiencies`."""
