"""Words what is wrong with a command line: what was asked, what is true, what to do.

click finds it: an unknown option, a missing argument, a value of another type. Its own words name no remedy,
and are not folded to the terminal.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

from shardwright.errors import ConfigError, UsageError
from shardwright.text import printable

# Of the copy of click in typer, or of click itself: that depends on the version of typer.
_click = sys.modules[typer.BadParameter.__module__]
CommandLineError: type[Exception] = _click.UsageError
"""What click raises for a command line that it cannot read."""

_MOST_LETTERS = 60
_EXAMPLE = re.compile(r"For example:\s+(shardwright .*?)(?:\n\n|$)", re.DOTALL)
_LEFT_OVER = re.compile(r"unexpected extra arguments?(?:\(s\))? \((.*)\)$", re.DOTALL)
_TASK = "shardwright search MODEL MACHINES -b N"
_INSTEAD = {
    "plan make": "plan itself makes one: shardwright plan model.py:build -n 2",
    "plan show": "To see one: shardwright show PLAN_OR_RUN",
    "plan diff": "To compare two: shardwright compare PLAN OTHER_PLAN; exit code 1 where they differ",
    "diff": "To compare two plans: shardwright compare PLAN OTHER_PLAN; exit code 1 where they differ",
    "ckpt recover": "No list of them can be lost. To read all: shardwright ckpt verify runs/NAME",
    "schedule show": "schedule itself draws one: shardwright schedule 1f1b -n 4",
    "schedule export": "To see one: shardwright schedule KIND; build_schedule returns its actions",
    "schedule check": "To check one: shardwright.schedule.validate raises what is wrong",
    "why-not": f"To compare what you have in mind with the best: {_TASK} --why-not tensor=8,pipeline=4",
    "what-if": "Search once more, with other machines, or a file: shardwright catalogue MACHINES -o FILE",
    "cheapest": f"To choose the number of machines: {_TASK} --tokens 300e9 --days 10",
    "simulate": "What would change a plan's step: shardwright explain PLAN",
    "cluster": "To see machines, or write their file: shardwright catalogue MACHINES -o FILE",
    "resume": "To continue a run: shardwright run --resume train.py",
    "watch": "What each rank does: shardwright status NAME --follow; steps: tail -f runs/NAME/metrics.jsonl",
    "export": "To write a model from checkpoints: shardwright ckpt export RUN -o FOLDER",
    **dict.fromkeys(("launch", "start", "train"), "To start ranks: shardwright run -n 2 train.py"),
}
"""Commands that are not there, or not any more, by what does it."""

_OPTIONS_THAT_WERE = {
    **dict.fromkeys(
        ("compare -o", "compare --output", "compare --open"),
        "Two pages side by side: shardwright report RUN --open, for each run; the figures: shardwright runs.",
    ),
    **dict.fromkeys(
        ("plan --verify", "plan --trial-steps"),
        "To try plans here: run each with shardwright run --plan FILE; shardwright runs lists their speed.",
    ),
    **dict.fromkeys(
        ("schedule --forward", "schedule --backward", "schedule --weight", "schedule --send"),
        "Stages are equal, and messages take no time. Those of a model's own: shardwright explain PLAN",
    ),
    "probe --show": "It is shown when it is measured: shardwright probe -n 4 prices.json",
    "search --what-if": "Search once more, with other machines or a file of them: shardwright catalogue "
    "MACHINES -o FILE",
    **dict.fromkeys(
        ("explain --what-if", "explain --trace"),
        "What would change the step is below what it is spent on; a plan with other settings: shardwright "
        "plan --set microbatches=8; the timeline: shardwright report.",
    ),
    "plan --machine": "Name the machines, or their file, by --cluster; to write one that you can edit: "
    "shardwright catalogue p4d.24xlarge -o mine.yaml",
}
"""Options that are not there any more, behind their command, by what does it."""

_OF_TORCHRUN = frozenset(
    "--local-addr --log-dir --master-addr --master-port --monitor-interval --no-python --rdzv-backend "
    "--rdzv-conf --rdzv-id --redirects --role --standalone --start-method --tee".split()
)
_IN_OTHER_WORDS = {
    "-n": frozenset(
        "--gpus --ngpus --nproc --nprocs --num-gpus --num-processes --ranks --world --world-size".split()
    ),
    "--sequence": frozenset("--seq --seq-len --seq-length --sequence-length --length --context".split()),
}
"""Options of ours, and what others call them."""
_FIRST_LETTER = re.compile(r"^[A-Z](?=[a-z ])")


def refuse_former(words: Sequence[str]) -> None:
    """Answers a command of before, or of another tool, with the one that does it."""
    names = [word.replace("_", "-") for word in words[:2] if not word.startswith("-")]
    for number in range(len(names), 0, -1):
        if (instead := _INSTEAD.get(" ".join(names[:number]))) is not None:
            of_group = f"{names[0]} has" if number == 2 else "there is"
            raise UsageError(f"{of_group} no command {names[number - 1]}. {instead}")


class Group(TyperGroup):
    """Commands of a group, of which another one is refused in our words."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As click has it, for a command that there is."""
        name = args[0]
        if not name.startswith("-") and name.replace("_", "-") not in self.commands:
            raise UsageError(self._no_command(ctx, name))
        return super().resolve_command(ctx, args)

    def _no_command(self, context: Any, name: str) -> str:
        of_group = f"{_command(context)} has" if context.parent else "there is"
        said = f"{of_group} no command {_short(name)}."
        if name.endswith(".py"):
            return f"{said} To run a script: shardwright run -n 2 {_short(name)}"
        return f"{said} {_near(name, self.commands)}All of them: {context.command_path} --help"


def reworded(error: Any) -> UsageError | None:
    """What click complains about, as our own error; None where a group without a command shows its help."""
    if isinstance(error, getattr(_click, "NoArgsIsHelpError", ())):  # click 8.1 has none
        return None
    if isinstance(error, _click.NoSuchOption):
        return UsageError(_no_option(error))
    if isinstance(error, _click.MissingParameter):
        return UsageError(_missing(error))
    if isinstance(error, _click.BadParameter) and error.param is not None:
        return UsageError(_bad_value(error))
    if isinstance(error, _click.BadOptionUsage):
        return UsageError(_bad_use(error))
    return UsageError(_other(error))


def _no_option(error: Any) -> str:
    context, typed = error.ctx, error.option_name
    options = [name for each in context.command.params for name in each.opts if name.startswith("-")]
    if context.parent is None:
        near = _near(typed, options)
        if near:
            return f"there is no option {_short(typed)}. {near}All of them: {context.command_path} --help"
        return f"{_short(typed)} stands before a command. Put it behind: shardwright run -n 2 train.py"
    said = f"{_command(context)} has no option {_short(typed)}"
    if (instead := _OPTIONS_THAT_WERE.get(f"{_command(context)} {typed}")) is not None:
        return f"{said}. {instead}"
    if "--rdzv-endpoint" in options and typed in _OF_TORCHRUN:
        return f"{said}, which is torchrun's. Leave it out; several hosts meet at --rdzv-endpoint."
    dashed = typed.replace("_", "-")
    for option, words in _IN_OTHER_WORDS.items():
        if dashed in words and option in options:
            return f"{said}. Write {option} NUMBER"
    if dashed in _IN_OTHER_WORDS["--sequence"]:
        return f"{said}: how long a sequence is, the batch says that model.py:build returns."
    instead = _by_another_way(typed, options)
    if instead is not None:
        return f"{said}. Write {instead}"
    return f"{said}. {_near(typed, options)}All of them: {context.command_path} --help"


def _near(typed: str, known: Iterable[str]) -> str:
    # Without dashes, which would make all short words alike; a letter is like none.
    words = {name.lstrip("-"): name for name in known if len(name.lstrip("-")) > 1}
    near = get_close_matches(typed.lstrip("-"), words, n=1)
    return f"Did you mean {words[near[0]]}? " if near else ""


def _by_another_way(typed: str, options: Sequence[str]) -> str | None:
    """How a command takes what is no option of it: as a setting, or as a pin of a search."""
    # Here, because they import pydantic and numpy: --help answers before.
    if "--set" in options:
        from shardwright.config import Config

        name = typed.lstrip("-").replace("-", "_")
        if name in Config.model_fields:
            return f"--set {name}=VALUE, for it is a setting."
    if "--pin" in options:
        from shardwright.planner.ways.space import parse_pins, values_of

        name = typed.lstrip("-").replace("-", "_")
        try:
            found = parse_pins([f"{name}=1"])
        except ConfigError:
            return None
        values = values_of(*found)
        return f"--pin {name}=VALUE{values and f', one of {values}'}"
    return None


def _missing(error: Any) -> str:
    context, parameter = error.ctx, error.param
    meaning = _FIRST_LETTER.sub(lambda found: found[0].lower(), parameter.help or "").rstrip(".")
    said = f"{_command(context)} needs {_name(parameter)}{f': {meaning}' if meaning else ''}."
    return f"{said} {_example(context)}"


def _bad_value(error: Any) -> str:
    name, cause = _name(error.param), error.__cause__
    findings = cause.errors() if hasattr(cause, "errors") else []
    if findings and findings[0]["type"] != "value_error":
        from shardwright.problems import describe

        return f"{describe([{**findings[0], 'loc': (name,)}], root=name)[0]}{_hint_for_value(error.param)}"
    return f"{name}: {error.message.removeprefix('Value error, ').rstrip('.')}."


def _hint_for_value(parameter: Any) -> str:
    """For ``-np 2`` of mpirun, and ``--nproc-per-node=auto`` of torchrun."""
    if "-n" not in parameter.opts:
        return ""
    return f" Write -n 2{'' if parameter.required else '; without it, a rank for each GPU'}."


def _bad_use(error: Any) -> str:
    """A value is missing behind an option, or one stands behind a switch."""
    name = error.option_name
    if "does not take" in error.message:
        return f"{name} takes no value. Write it alone."
    return f"{name} needs a value behind it: {name} VALUE"


def _other(error: Any) -> str:
    message, context = str(error.format_message()), error.ctx
    left_over = _LEFT_OVER.search(message)
    if context is None:
        return message
    if left_over is None:
        return f"{message} See: {context.command_path} --help"
    takes = [_name(each) for each in context.command.params if not _is_option(each)]
    return (
        f"{_command(context)} takes {_joined(takes)}, and {_short(left_over[1])} is left over. Leave it out, "
        "or put quotes around what has spaces."
    )


def _command(context: Any) -> str:
    """Without the name of the program, which would look like a line to copy."""
    return str(context.command_path).partition(" ")[2]


def _name(parameter: Any) -> str:
    """An option by its first long name, an argument as the help has it."""
    if _is_option(parameter):
        return str(next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0]))
    return str(parameter.metavar or parameter.name).strip("[]")


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _joined(names: Iterable[str]) -> str:
    return " and ".join(names) or "no argument"


def _example(context: Any) -> str:
    """The one in the help of a command, or where the help is."""
    found = _EXAMPLE.search(context.command.help or "")
    return f"For example: {' '.join(found[1].split())}" if found else f"See: {context.command_path} --help"


def _short(word: str) -> str:
    return printable(word if len(word) <= _MOST_LETTERS else f"{word[:_MOST_LETTERS]}...")
