"""Prices as a file: ``shardwright probe`` writes it, `SHARDWRIGHT_PRICES` names it."""

import os
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shardwright.collectives.prices import Curve, DevicePrices, Line, Prices
from shardwright.collectives.topology import Topology
from shardwright.errors import ConfigError
from shardwright.files import Record, UserFile, replace_file
from shardwright.files.number_fields import NonNegative, Positive
from shardwright.limits import MOST_RANKS

__all__ = ["PRICES_VARIABLE", "read_prices", "write_prices"]

PRICES_VARIABLE = "SHARDWRIGHT_PRICES"
_FORMAT, _VERSION = "shardwright-prices", 2


class _Line(Record):
    alpha_s: NonNegative
    Bps: Positive

    def line(self) -> Line:
        return Line(self.alpha_s, self.Bps)


Finite = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Node = Annotated[list[Annotated[int, Field(ge=0, lt=MOST_RANKS)]], Field(min_length=1)]
Points = Annotated[list[tuple[NonNegative, Finite]], Field(min_length=1)]


class _Curve(Record):
    points: Points

    @field_validator("points")
    @classmethod
    def _ascending(cls, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        if any(before >= after for (before, _), (after, _) in pairwise(points)):
            raise ValueError("the sizes must ascend")
        return points

    def curve(self) -> Curve:
        return Curve(tuple(self.points))


class _DevicePrices(Record):
    everyone: dict[str, _Line]
    across: dict[str, _Line]
    inside: dict[str, _Line]
    reorder: _Line
    source: str

    def prices(self) -> DevicePrices:
        return DevicePrices(
            everyone=_lines(self.everyone),
            across=_lines(self.across),
            inside=_lines(self.inside),
            reorder=self.reorder.line(),
            source=self.source,
        )


def _curves(records: dict[str, _Curve]) -> dict[str, Curve]:
    return {name: record.curve() for name, record in records.items()}


def _lines(records: dict[str, _Line]) -> dict[str, Line]:
    return {name: record.line() for name, record in records.items()}


class _Document(Record):
    format: Literal["shardwright-prices"]
    version: Literal[2]
    nodes: Annotated[list[Node], Field(min_length=1)]
    own: dict[str, _Curve]
    copy_: _Line = Field(alias="copy")
    combine: _Line
    note_s: NonNegative
    message: _Line
    local_message: _Line
    gloo: dict[str, _Curve]
    source: str
    devices: _DevicePrices | None = None

    @field_validator("nodes")
    @classmethod
    def _each_once(cls, nodes: list[list[int]]) -> list[list[int]]:
        ranks = sorted(rank for node in nodes for rank in node)
        if ranks != list(range(len(ranks))):
            raise ValueError(f"the {len(ranks)} ranks of a group are 0 to {len(ranks) - 1}, each once")
        return nodes


def write_prices(path: str | os.PathLike[str], prices: Prices, topology: Topology) -> None:
    """Writes prices, and the nodes that they were measured on."""
    content: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "nodes": topology.nodes}
    document = _Document.model_validate({**content, **asdict(prices)})
    replace_file(path, document.model_dump_json(by_alias=True, indent=2) + "\n")


def read_prices(path: str | os.PathLike[str]) -> tuple[Prices, Topology]:
    """Reads prices, and the nodes that they were measured on."""
    advice = "shardwright probe measures them anew"
    file = UserFile(path, what="prices", error=ConfigError, advice=advice)
    found = file.model(_Document, file.read_json())
    prices = Prices(
        own=_curves(found.own),
        copy=found.copy_.line(),
        combine=found.combine.line(),
        note_s=found.note_s,
        message=found.message.line(),
        local_message=found.local_message.line(),
        gloo=_curves(found.gloo),
        source=found.source,
        devices=None if found.devices is None else found.devices.prices(),
    )
    return prices, Topology(tuple(map(tuple, found.nodes)))
