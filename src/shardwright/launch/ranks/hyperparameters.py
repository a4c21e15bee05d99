"""Converts hyperparameters to command-line words and back, as SageMaker's containers do.

::

    {"epochs": 3, "lr": 0.1, "mp_parameters": {"partitions": 2, "ddp": True}}
    --epochs 3 --lr 0.1 --mp_parameters ddp=True,partitions=2
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.errors import ConfigError
from shardwright.launch.processes.process_text import shown, why_no_name, why_no_text

__all__ = ["from_words", "hyperparameter_variables", "to_text", "to_words", "with_plain_values"]

_NUMBER = re.compile(r"-[\d.]")


def with_plain_values(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as the script will see them: after a way through JSON."""
    plain: dict[str, Any] = {}
    for name, value in hyperparameters.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"a hyperparameter is called {name!r}, but it becomes an option of the script, so it must "
                'be text: hyperparameters={"epochs": 3}'
            )
        if (reason := why_no_name(name)) is not None:
            raise ConfigError(f"a hyperparameter is called {name!r}, but {reason}. Give it another name.")
        try:
            plain[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"hyperparameter {name} is {shown(value)}, which JSON cannot express ({error}). Give a "
                "number, text, a list, a dictionary, True, False or None."
            ) from error
        if (reason := why_no_text(to_words({name: plain[name]})[1])) is not None:
            raise ConfigError(f"hyperparameter {name} is {shown(value)}, but {reason}. Give another value.")
    return plain


def to_words(hyperparameters: Mapping[str, Any]) -> tuple[str, ...]:
    """The words that the script gets: ``--name value``, sorted by name.

    >>> to_words({"lr": 0.1, "b": 8, "mp_parameters": {"partitions": 2, "ddp": True}})
    ('-b', '8', '--lr', '0.1', '--mp_parameters', 'ddp=True,partitions=2')
    """
    words: list[str] = []
    for name in sorted(hyperparameters):
        value = hyperparameters[name]
        dashes = "-" if len(name) == 1 else "--"
        text = ",".join(f"{k}={value[k]}" for k in sorted(value)) if isinstance(value, dict) else str(value)
        words += [f"{dashes}{name}", text]
    return tuple(words)


def from_words(words: Sequence[str]) -> dict[str, Any]:
    """Hyperparameters from the words that a script gets; words that are no option are left out.

    >>> from_words(["input.txt", "--epochs", "3", "--lr=-0.1", "--fp16", "--name", "a b"])
    {'epochs': 3, 'lr': -0.1, 'fp16': True, 'name': 'a b'}
    """
    found: dict[str, Any] = {}
    index = 0
    while index < len(words):
        name, equals, value = words[index].partition("=")
        index += 1
        if not _is_option(name):
            continue
        if not equals and index < len(words) and not _is_option(words[index]):
            equals, value = "=", words[index]
            index += 1
        found[name.lstrip("-")] = _typed(value) if equals else True
    return found


def hyperparameter_variables(hyperparameters: Mapping[str, Any]) -> dict[str, str]:
    """``SM_HP_<NAME>`` for each; under the name with ``_``, too, where it has ``-``."""
    variables: dict[str, str] = {}
    for name, value in hyperparameters.items():
        variable = f"SM_HP_{name.upper()}"
        variables[variable] = variables[variable.replace("-", "_")] = to_text(value)
    return variables


def to_text(value: Any) -> str:
    """A value as text for a variable: text unchanged, the rest as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))


def _is_option(word: str) -> bool:
    return word.startswith("-") and word.strip("-") != "" and not _NUMBER.match(word)


def _typed(text: str) -> Any:
    words: dict[str, Any] = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if json.dumps(value) != "NaN" and value not in (float("inf"), float("-inf")) else text
