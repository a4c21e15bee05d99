"""Tensor parallelism for any module, unedited.

A `DividedTensor` shows the shape of the whole tensor and holds what one rank has of it: a part (`Cut`), or a
summand (`PartialSum`). It dispatches below autograd, so every operation of PyTorch, in the forward and in the
backward, comes by with the shapes that the script sees::

    y = x @ w           w: (6, 8), cut along dimension 1 over two ranks

    script              x (4, 6)  @  w (4+4 columns)  ->  y (4, 8)
    rank 0              x (4, 6)  @  w[:, :4]         ->  y[:, :4]
    rank 1              x (4, 6)  @  w[:, 4:]         ->  y[:, 4:]

Each operation has a *rule* (`rules/`): which placements of its arguments give which placements of its
results. Most rules are one line of letters, ``mk,kn->mn``: a letter may be cut, all tensors that have it are
cut alike, and a result that lacks it is a sum over the ranks, which stays pending (`call.py`). A call has
several *candidates*; the cheapest, by the price of changing placements, is taken, and the decision is kept
(`deciding.py`). An operation without a rule gathers its arguments, and every rank does it all: slower, never
wrong. So exactness rests on the rules alone, not on knowing a model.

What is whole is an ordinary tensor, without any cost.

The way of an operation, file by file:

    ====================== ================================================================================
    `divided_tensor.py`    The class. It looks its decision up by operation, tensors and scalars.
    `deciding.py`          Chooses among the candidates of the rule; `decision.py` runs the operation so,
                           `nested_decision.py` where ranks form a grid or tokens find their experts.
    `call.py`              The operation as a rule sees it, and what a rule says of it.
    `rules/`               The rules, one file a family of operations.
    `redistribution.py`    Changes a placement; `placing.py` keeps what was exchanged, and copies of views.
    `nesting.py`           Ranks in a grid: a part of a tensor that other ranks share in turn.
    `spec.py`, `group.py`  What is known of a tensor, what a change of it sends, to the byte; the ranks, their
                           pending sums and last gathers.
    `boundary.py`          What leaves a unit whose tensors ranks share.
    `divide.py`            Divides a module's parameters, and settles their gradients once a step.
    `experts.py`           Experts of which each rank has some; `expert_list.py` for those of a list.
    `search/`              Finds how to divide them, by the same rules, without running anything.
    ====================== ================================================================================

To write a rule: add a function to a file of `rules/` with ``@rule("name")``, and a case to the fuzz test
(`tests/unit/torch/tensor_parallel/random_calls.py`), which tries it with random placements on 2 and 3 ranks.
Kernels that take a layout for granted need `spec.py`; arguments that are shapes go to `Form.sizes`.
"""
