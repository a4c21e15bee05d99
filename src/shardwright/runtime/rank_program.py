"""The program of one rank in a microbatch, as far as it is the same for every framework."""

from collections.abc import Mapping
from typing import Protocol

from shardwright.runtime.crossings import Crossings

__all__ = ["RankProgram"]


class RankProgram(Protocol):
    """The part of one pipeline rank in a microbatch.

    Attributes:
        crossings: what forwards send from stage to stage, on all ranks.
        gradients: what backwards send: (sending stage, receiving stage) -> values.
        state: buffers that the step function changes -> pipeline rank of their home.
        offloads: stages of which units are offloaded, on all ranks.
    """

    @property
    def stage_ranks(self) -> tuple[int, ...]: ...
    @property
    def crossings(self) -> Crossings: ...
    @property
    def gradients(self) -> Crossings: ...
    @property
    def state(self) -> Mapping[str, int]: ...
    @property
    def offloads(self) -> frozenset[int]: ...
