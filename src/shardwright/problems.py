"""Words the problems that pydantic finds as our own: one line each."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import BaseModel

from shardwright.text import printable, shown

_RULES = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dataclass_type": "an object",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_parsing_size": "a whole number of fewer digits",
    "list_type": "a list",
    "too_short": "no shorter than {min_length}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
    "model_type": "an object",
    "string_type": "text",
    "tuple_type": "a list",
}


_MOST_LINES = 20
_MOST_LETTERS = 200  # of a name


def no_bool(value: Any) -> Any:
    """Refuses true and false, which pydantic reads as 1 and 0: a slip would become "one microbatch"."""
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def describe(findings: Iterable[Mapping[str, Any]], *, root: str, known: Iterable[str] = ()) -> list[str]:
    """One line for each finding."""
    return [_line(finding, root, tuple(known)) for finding in findings]


@cache
def field_names(model: type[BaseModel]) -> tuple[str, ...]:
    schema = model.model_json_schema()
    objects = (schema, *schema.get("$defs", {}).values())
    return tuple(dict.fromkeys(name for each in objects for name in each.get("properties", ())))


def join(title: str, problems: Sequence[str]) -> str:
    """A title, and below it one line for each problem; a single one goes on in the same line."""
    if len(problems) == 1:
        return f"{title} {problems[0]}"
    left = len(problems) - _MOST_LINES
    more = [f"  and {left} more."] if left > 0 else []
    return "\n".join([title, *(f"  {problem}" for problem in problems[:_MOST_LINES]), *more])


def _line(finding: Mapping[str, Any], root: str, known: Sequence[str]) -> str:
    key = printable(".".join(str(part)[:_MOST_LETTERS] for part in finding["loc"])) or root
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == "missing":
        return f"{key} is missing."
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        near = get_close_matches(str(finding["loc"][-1])[:_MOST_LETTERS], known, n=1, cutoff=0.6)
        return f"{key} is not a field. " + (f"Did you mean {near[0]}?" if near else "Remove it.")
    if kind == "json_invalid":
        return f"{root} is no JSON: {context['error']}."
    if kind == "value_error" and not finding["loc"]:
        return f"{root}: {context['error']}."
    if kind == "value_error":
        rule = str(context["error"])
    elif kind in _RULES:
        rule = "it must be " + _RULES[kind].format(**context)
    else:
        rule = str(finding["msg"])
    return f"{key} is {shown(finding['input'])}, but {rule}."
