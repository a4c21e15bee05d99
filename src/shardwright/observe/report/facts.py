"""What a run was: command, model, machine, versions, commit, settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.files import UserFile
from shardwright.observe.metrics import read_json_lines
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.run_record import read_record
from shardwright.observe.surroundings import without_secrets

_UNSHOWN = frozenset({"run_dir", "run_name", "ignored"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run was; empty where it is not known.

    Attributes:
        microbatches: how they were run at its end.
        begun: when it began or went on last, in UTC.
        machine: host, device, cores, system; by name.
        settings: those that are not the defaults, by name.
    """

    model: str = ""
    command: str = ""
    state: str = ""
    microbatches: str = ""
    begun: str = ""
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    commit: str = ""
    settings: Mapping[str, str]

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as a page lists them; what is not known is left out."""
        joined = {name: f"{name} {version}" for name, version in self.versions.items()}
        rows = [
            ("command", self.command),
            ("state", self.state),
            ("begun", self.begun),
            ("model", self.model),
            ("microbatches", self.microbatches),
            *self.machine.items(),
            ("versions", ", ".join(joined.values())),
            ("commit", self.commit),
            ("settings", ", ".join(f"{name} = {value}" for name, value in self.settings.items())),
        ]
        return [(name, value) for name, value in rows if value]


def read_facts(folder: RunFolder) -> RunFacts:
    """What the files of a run tell; a file that cannot be read tells nothing."""
    record = read_record(folder)
    surroundings = _events(folder)
    begun_s = 0.0 if record is None else record.begun_s
    command = "" if record is None else record.command or " ".join((record.script, *record.arguments))
    return RunFacts(
        model=_text(surroundings.get("model")),
        command=without_secrets(command),
        microbatches=_text(surroundings.get("microbatches")),
        # A run writes its report before its launcher writes how it ended.
        state="" if record is None or record.state == "running" else record.state,
        begun=datetime.fromtimestamp(begun_s, UTC).strftime("%Y-%m-%d %H:%M UTC") if begun_s else "",
        machine=_texts(surroundings.get("machine")),
        versions=_texts(surroundings.get("versions")),
        commit=_text(surroundings.get("commit")),
        settings=_settings(folder),
    )


def _events(folder: RunFolder) -> dict[str, Any]:
    """The fields of the last event of each kind that tells about the run."""
    if not folder.events_file.is_file():
        return {}
    found: dict[str, Any] = {}
    try:
        events = read_json_lines(folder.events_file)
    except UsageError:
        return {}
    for event in events:
        if event.get("kind") in ("surroundings", "model_known", "microbatches_run"):
            found |= event
    return found


def _settings(folder: RunFolder) -> dict[str, str]:
    if not folder.config_file.is_file():
        return {}
    try:
        document = UserFile(folder.config_file, what="", error=UsageError).read_json()
    except UsageError:
        return {}
    if not isinstance(document, dict):
        return {}
    defaults = Config.parse({}).model_dump(mode="json")
    return {
        str(name): "off" if value is False else "on" if value is True else str(value)
        for name, value in document.items()
        if name not in _UNSHOWN and value != defaults.get(name)
    }


def _texts(value: object) -> dict[str, str]:
    return {str(name): str(each) for name, each in value.items()} if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
