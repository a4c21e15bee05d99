"""A measured model as a file: what ``shardwright profile`` writes, and ``plan make --profile`` plans from.

It holds what units cost, by cost class, and the machines that they were measured on; the model is traced
anew. So one file serves every number of ranks and every grid, as long as microbatches have sizes that were
measured; the cost of others is estimated, and plans say so.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from shardwright import __version__
from shardwright.cluster import Cluster, Device, Link
from shardwright.errors import ConfigError
from shardwright.problems import describe, join
from shardwright.profile import UnitCost

__all__ = ["MeasuredProfile"]

_MOST_S = 1e6  # days for one unit are a mistake
Seconds = Annotated[float, Field(ge=0, le=_MOST_S)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """What a model's units cost on some machines.

    Attributes:
        fingerprint: of the model, as plans have it.
        costs: by cost class.
        cluster: the machines.
        num_ranks: that measured at the same time.
        when: date and time, UTC.
    """

    fingerprint: str
    costs: Mapping[str, UnitCost]
    cluster: Cluster
    num_ranks: int
    when: str

    def to_dict(self) -> dict[str, Any]:
        """A form that `json` can write."""
        return {
            "format": "shardwright-profile",
            "version": 1,
            "created_by": f"shardwright {__version__}",
            "fingerprint": self.fingerprint,
            "num_ranks": self.num_ranks,
            "when": self.when,
            "cluster": asdict(self.cluster),
            "costs": {key: asdict(cost) for key, cost in self.costs.items()},
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, whole or not at all."""
        document = _Document.model_validate(self.to_dict())
        path = Path(path)
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        temporary.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "MeasuredProfile":
        """Reads a file.

        Raises:
            ConfigError: it cannot be read, or is no profile; all fields that are wrong are named.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            found = _Document.model_validate_json(text)
        except OSError as error:
            raise ConfigError(f"profile {path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"profile {path} is no text: {error}.") from error
        except ValidationError as error:
            problems = describe(error.errors(), root="the file")
            raise ConfigError(
                join(f"profile {path} cannot be used; shardwright profile makes it anew:", problems)
            ) from error
        return cls(
            fingerprint=found.fingerprint,
            costs={key: UnitCost(**cost.model_dump()) for key, cost in found.costs.items()},
            cluster=found.cluster.cluster(),
            num_ranks=found.num_ranks,
            when=found.when,
        )


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Link(_Record):
    latency_s: Seconds
    bandwidth_Bps: Positive
    occupancy: Annotated[float, Field(ge=0, le=1)] = 0.0

    def link(self) -> Link:
        return Link(**self.model_dump())


class _Device(_Record):
    name: str
    memory_bytes: NonNegativeInt
    flops_per_s: Positive
    reached: Annotated[float, Field(gt=0, le=1)] = 0.7
    memory_Bps: Positive
    overhead_s: Seconds
    update_Bps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class _Cluster(_Record):
    device: _Device
    ranks_per_node: PositiveInt
    cores_per_node: NonNegativeInt
    intra_node: _Link
    inter_node: _Link
    slowness: tuple[Positive, ...] = ()

    def cluster(self) -> Cluster:
        return Cluster(
            device=Device(**self.device.model_dump()),
            ranks_per_node=self.ranks_per_node,
            cores_per_node=self.cores_per_node,
            intra_node=self.intra_node.link(),
            inter_node=self.inter_node.link(),
            slowness=self.slowness,
        )


class _Cost(_Record):
    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds = 0.0
    saved_bytes: NonNegativeInt = 0
    input_bytes: NonNegativeInt = 0
    work_bytes: NonNegativeInt = 0
    weight_bytes: NonNegativeInt | None = None
    split_work_bytes: NonNegativeInt | None = None
    input_s: Seconds | None = None
    flops: NonNegativeInt = 0
    provenance: Literal["measured", "estimated"] = "measured"
    spread: Seconds = 0.0


class _Document(_Record):
    format: Literal["shardwright-profile"]
    version: Literal[1]
    created_by: str
    fingerprint: str
    num_ranks: PositiveInt
    when: str
    cluster: _Cluster
    costs: dict[str, _Cost]
