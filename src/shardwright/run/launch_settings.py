"""Settings that a launcher passes, and settings that a plan overrides."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.comm._private import DEVICE_VARIABLE
from shardwright.config import Config
from shardwright.errors import ConfigError
from shardwright.files import DocumentError, UserFile, parse_json
from shardwright.plan import Plan
from shardwright.planner import overruled_settings
from shardwright.problems import join
from shardwright.text import shown


def given_settings(
    config: "Mapping[str, Any] | Config | Plan | str | os.PathLike[str] | None",
) -> tuple[Config, Plan | None]:
    """What a script passes to ``init``, with what the launcher was told; and the plan to follow."""
    plan: Plan | None = None
    given: Mapping[str, Any] | Config | None = None
    if isinstance(config, Plan):
        plan = config
    elif isinstance(config, str | os.PathLike):
        if Path(config).suffix in (".yaml", ".yml"):
            raise ConfigError(
                f"init was given {shown(str(config))}, but it takes a plan file, or settings. A file of "
                f"settings goes to the command: shardwright run --config {config} train.py"
            )
        given = {"plan": str(Path(config))}
    elif config is None or isinstance(config, Mapping | Config):
        given = config
    else:
        raise ConfigError(
            f"init takes a dictionary of settings, or the path of a plan file, not a "
            f"{type(config).__name__}. For example: sw.init({{'microbatches': 4}})"
        )
    settings = Config.merge(given, *settings_from(os.environ))
    if settings.plan_file is not None:
        plan = Plan.read(settings.plan_file)
    return settings, plan


def settings_from(environ: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Settings that the launcher passes by environment variables, weakest first.

    ``SHARDWRIGHT_CONFIG`` names a JSON or YAML file, ``SHARDWRIGHT_SET`` is a JSON object,
    ``SHARDWRIGHT_PLAN`` names a plan file. (``SHARDWRIGHT_RUN_DIR`` is for `RunFolder.create`.)
    """
    if (chosen := environ.get(DEVICE_VARIABLE) or "auto") not in ("auto", "cpu"):
        raise ConfigError(f"{DEVICE_VARIABLE} is {shown(chosen)}, but it must be auto or cpu.")
    layers: list[Mapping[str, Any]] = []
    if path := environ.get("SHARDWRIGHT_CONFIG"):
        file = UserFile(path, what="SHARDWRIGHT_CONFIG", error=ConfigError)
        found = _object("SHARDWRIGHT_CONFIG", {} if (held := file.read_yaml()) is None else held)
        Config.check(found, source=str(file))
        layers.append(found)
    if text := environ.get("SHARDWRIGHT_SET"):
        try:
            found = parse_json(text)
        except DocumentError as error:
            raise ConfigError(
                f"SHARDWRIGHT_SET is {shown(text)}, but it must be an object such as "
                f'{{"microbatches": 4}}: {error}.'
            ) from None
        layers.append(_object("SHARDWRIGHT_SET", found))
    if path := environ.get("SHARDWRIGHT_PLAN"):
        layers.append({"plan": path})
    return layers


def _object(variable: str, found: Any) -> Mapping[str, Any]:
    if isinstance(found, Mapping):
        return found
    raise ConfigError(
        f"the settings of {variable} are {shown(found)}, but they must be an object such as "
        '{"microbatches": 4}.'
    )


# What else a plan was made for: in float32, or with more of the optimizer's state, a model may not fit.
_MADE_FOR = ("bf16", "fp16", "shard_optimizer_state")


def following(plan: Plan, config: Config, *, warns: bool) -> Config:
    """The settings as a plan has them; warns of those that it overrules."""
    overruled = list(overruled_settings(plan, config))
    if overruled and warns:
        warnings.warn(join("the plan decides otherwise than the settings:", overruled), stacklevel=4)
    given = config.model_fields_set  # also where it is the default
    return Config.merge(
        config,
        {
            **plan.mesh.settings,
            "microbatches": plan.schedule.microbatches,
            **{key: plan.pins[key] for key in _MADE_FOR if key in plan.pins and key not in given},
        },
    )
