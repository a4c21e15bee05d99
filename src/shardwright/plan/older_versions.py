"""Reads plan files of older versions of the format.

| version | what it changed |
| --- | --- |
| 2 | `prediction.memory` has the unit in its names: `activations_bytes`, not `activations` |
| 2, later | no corrections by earlier runs: `prediction.correction`, `prediction.conditions.outside_s` |
"""

from typing import Any

__all__ = ["brought_up"]

_MEMORY = ("parameters", "gradients", "optimizer", "activations", "batch", "work")


def brought_up(document: dict[str, Any]) -> dict[str, Any]:
    """A plan's JSON object in the form of this version; what is of none of the older ones stays as it is."""
    version = document.get("plan_version")
    found = _from_1(document) if version == 1 and not isinstance(version, bool) else document
    return _without_corrections(found)


def _without_corrections(document: dict[str, Any]) -> dict[str, Any]:
    prediction = document.get("prediction")
    if not isinstance(prediction, dict):
        return document
    kept = {name: value for name, value in prediction.items() if name != "correction"}
    if isinstance(conditions := kept.get("conditions"), dict):
        kept["conditions"] = {name: value for name, value in conditions.items() if name != "outside_s"}
    return {**document, "prediction": kept}


def _from_1(document: dict[str, Any]) -> dict[str, Any]:
    found = {**document, "plan_version": 2}
    prediction = document.get("prediction")
    if isinstance(prediction, dict) and isinstance(memory := prediction.get("memory"), list):
        found["prediction"] = {**prediction, "memory": [_with_units(part) for part in memory]}
    return found


def _with_units(memory: Any) -> Any:
    """The memory of a rank; anything else is for the reader to refuse."""
    if not isinstance(memory, dict):
        return memory
    return {f"{name}_bytes" if name in _MEMORY else name: value for name, value in memory.items()}
