"""What pydantic finds wrong, in our own words: one line for each problem."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["describe", "join"]

_RULES = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
    "model_type": "an object",
    "string_type": "text",
    "tuple_type": "a list",
}


_MOST_SHOWN = 200


def describe(findings: Iterable[Mapping[str, Any]], *, root: str) -> list[str]:
    """One line for each finding.

    Args:
        findings: what `pydantic.ValidationError.errors` returns.
        root: name of the whole document, for findings that concern no single field.
    """
    return [_line(finding, root) for finding in findings]


def join(title: str, problems: Sequence[str]) -> str:
    """A title, and below it one line for each problem."""
    return "\n".join([title, *(f"  {problem}" for problem in problems)])


def _line(finding: Mapping[str, Any], root: str) -> str:
    key = ".".join(map(str, finding["loc"]))
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == "missing":
        return f"{key} is missing."
    if kind == "extra_forbidden":
        return f"{key} is not a field. Remove it."
    if kind == "json_invalid":
        return f"{root} is no JSON: {context['error']}."
    if kind == "value_error" and not key:
        return f"{root}: {context['error']}."
    if kind == "value_error":
        rule = str(context["error"])
    elif kind in _RULES:
        rule = "it must be " + _RULES[kind].format(**context)
    else:
        rule = str(finding["msg"])
    given = repr(finding["input"])
    given = given if len(given) <= _MOST_SHOWN else f"{given[:_MOST_SHOWN]}..."
    return f"{key} is {given}, but {rule}."
