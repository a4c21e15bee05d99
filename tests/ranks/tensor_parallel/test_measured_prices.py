"""What ranks measure before a plan is made: how long an operation on divided tensors takes."""

import shardwright.torch as sw
from shardwright.testing import run_ranks
from shardwright.torch.measuring.tensor_prices import measured_operation_s
from shardwright.torch.run.context import context


def measured() -> float:
    sw.init({"run_dir": "off", "tensor_parallel_degree": 2})
    found = measured_operation_s(context())
    sw.shutdown()
    return found


def test_all_ranks_take_one_price_of_an_operation():
    first, second = run_ranks(measured, 2, timeout_s=60)
    # Python's own time: no machine is so fast, or so busy, that it were outside of this.
    assert 1e-6 < first == second < 5e-3
