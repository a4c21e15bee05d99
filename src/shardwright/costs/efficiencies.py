"""The calibrated parameters: achieved fractions of peak rates, and overheads of runtimes."""

from dataclasses import dataclass, fields
from typing import NamedTuple

from shardwright.costs.inputs import Numbers

__all__ = ["OF_ACCELERATORS", "PRIORS", "Efficiencies", "Prior"]


class Prior(NamedTuple):
    """The prior of a parameter before any measurement: a log-normal distribution.

    Attributes:
        spread: standard deviation of its logarithm.
    """

    median: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Numbers, or arrays with an entry for each candidate.

    Attributes:
        matmul: share of the peak that large matrix products reach.
        half_size: size of a product's smallest side at which it takes twice as long as it should.
        memory: share of the peak that memory reaches.
        elementwise: bytes that elementwise kernels move, as a multiple of 64 a token and hidden element.
        scores_bytes: bytes that attention without fusion moves, for each score.
        scores: share of the peak that its products reach.
        flash_forward: share of the peak of fused attention, forward.
        kernel_s: seconds to launch a kernel.
        update: share of the peak that the optimizer's memory traffic reaches.
        link: share of the link's rate that collectives inside of a node seem to reach; above 1 where
            computing hides a part of them.
        matmul_factor: of the runtime's kernels, on `matmul`.
        scores_factor: of the runtime's kernels, on `scores_bytes`.
        gather_network: share of the network's rate that gathers and reduce-scatters reach.
        gather_link: share of the link's rate that they reach.
        hierarchical_network: share of the network's rate where they know about nodes.
        reduce_network: share of the network's rate that all-reduces over replicas reach.
        point_to_point: share of a link's rate that messages between stages seem to reach; above 1 where
            computing hides a part of them.
        overlap: share of the computing behind which gathers and reduce-scatters hide.
        layer_s: seconds of a block and microbatch, whatever its size.
        microbatch_s: seconds of a microbatch, whatever its size.
        step_s: seconds of a step, whatever its size.
    """

    matmul: Numbers
    half_size: Numbers
    memory: Numbers
    elementwise: Numbers
    scores_bytes: Numbers
    scores: Numbers
    flash_forward: Numbers
    flash_backward: Numbers
    kernel_s: Numbers
    update: Numbers
    link: Numbers
    matmul_factor: Numbers
    scores_factor: Numbers
    gather_network: Numbers
    gather_link: Numbers
    hierarchical_network: Numbers
    reduce_network: Numbers
    point_to_point: Numbers
    overlap: Numbers
    layer_s: Numbers
    microbatch_s: Numbers
    step_s: Numbers

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all parameters."""
        return tuple(field.name for field in fields(cls))


OF_ACCELERATORS = frozenset(Efficiencies.names()[:10])
"""Parameters of a family of accelerators; the others are those of a runtime on it."""

PRIORS: dict[str, Prior] = {
    "matmul": Prior(0.8, 0.15),
    "half_size": Prior(25, 0.5),
    "memory": Prior(0.8, 0.1),
    "elementwise": Prior(1.0, 0.3),
    "scores_bytes": Prior(12, 0.4),
    "scores": Prior(0.4, 0.5),
    "flash_forward": Prior(0.55, 0.3),
    "flash_backward": Prior(0.45, 0.3),
    "kernel_s": Prior(6e-6, 0.4),
    "update": Prior(0.6, 0.5),
    "link": Prior(0.6, 0.3),
    "matmul_factor": Prior(1.0, 0.1),
    "scores_factor": Prior(1.0, 0.3),
    "gather_network": Prior(0.4, 0.5),
    "gather_link": Prior(0.6, 0.4),
    "hierarchical_network": Prior(0.55, 0.4),
    "reduce_network": Prior(0.5, 0.5),
    "point_to_point": Prior(0.5, 0.6),
    "overlap": Prior(0.5, 0.6),
    "layer_s": Prior(1e-4, 1.0),
    "microbatch_s": Prior(1e-3, 1.0),
    "step_s": Prior(0.03, 1.0),
}
"""From publications and data sheets; wide where these differ."""
