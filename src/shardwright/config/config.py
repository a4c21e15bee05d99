"""The configuration of a run: settings that were read, what cannot go together, and what follows.

A planning setting that differs from its default is a *pin*: the planner keeps it, and chooses the rest.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from math import prod
from typing import Any, Literal

from pydantic import ValidationError

from shardwright.config.names import canonical, dictionary_of, ignored_names
from shardwright.config.settings import Settings
from shardwright.errors import ConfigError, UsageError
from shardwright.mesh import Mesh
from shardwright.problems import describe, join
from shardwright.quantities import counted
from shardwright.text import shown


def _contradictions(settings: Settings) -> Iterator[str]:
    """What the settings ask for together and cannot be had: one text for each, with its remedy."""
    degree = settings.pipeline_parallel_degree
    if not settings.auto_partition and settings.default_partition is None and settings.plan in (None, ANEW):
        yield (
            "auto_partition is false, but default_partition is not set: units outside any "
            "sw.partition need a place. Set default_partition, for example 0."
        )
    if degree is not None and settings.default_partition is not None and settings.default_partition >= degree:
        yield _outside_pipeline(settings.default_partition, degree)
    yield from _of_sharing(settings)
    if settings.bf16 and settings.fp16:
        yield "bf16 and fp16 are both set, but parameters have one type. Remove one of the two."
    stages = settings.virtual_stages
    if stages is not None and not settings.auto_partition:
        yield (
            f"virtual_stages is {stages}, but auto_partition is false: sw.partition says what runs "
            "where, and so how many stages there are. Remove one of the two."
        )
    if stages is not None and stages > 1 and settings.pipeline in ("gpipe", "1f1b", "zb_h1"):
        yield (
            f"virtual_stages is {stages}, but pipeline {settings.pipeline} runs one stage on each rank. "
            "Use interleaved_1f1b, or set virtual_stages 1."
        )
    if stages is not None and stages != 2 and settings.pipeline == "zb_v":
        yield f"virtual_stages is {stages}, but pipeline zb_v runs 2 stages on each rank. Remove one."


def _of_sharing(settings: Settings) -> Iterator[str]:
    """What cannot be, of ranks that share a batch."""
    above = {
        f"{name}_parallel_degree": degree for name, degree in settings.shared_degrees.items() if degree > 1
    }
    if len(above) > 2:
        given = " and ".join(f"{name} {degree}" for name, degree in above.items())
        yield (
            f"{given} are set, but ranks share a batch in two ways at most. Set one of them to 1; any "
            "two go together."
        )


def _outside_pipeline(default: int, degree: int) -> str:
    """The error for a `default_partition` that is no pipeline rank."""
    return (
        f"default_partition is {default}, but pipeline_parallel_degree is {degree}: "
        f"pipeline ranks run from 0 to {degree - 1}."
    )


# The dimension of tensors along which sequences are cut: the batch is cut into microbatches along the first.
_SEQUENCES = 1

ANEW = "anew"
"""The value of `plan` that asks for a new one."""

# Settings that the planner does not look at.
_NO_PINS = frozenset(
    (
        "ddp_port ignored log_interval measure_s on_nonfinite report run_dir run_name seed shared_memory "
        "steps timeout_s trace trackers"
    ).split()
)


class Config(Settings):
    """All settings of a run; make one with `Config.parse` or `Config.merge`.

    >>> config = Config.parse({"partitions": 2, "microbatches": 4, "pipeline": "interleaved"})
    >>> config.pipeline_parallel_degree, config.microbatches, config.pipeline
    (2, 4, '1f1b')
    """

    @classmethod
    def parse(cls, settings: "Mapping[str, Any] | Config | None" = None) -> "Config":
        """Reads one dictionary of settings.

        Raises:
            ConfigError: a setting is unknown, out of range or contradicts another; all problems are listed,
                one line each.
        """
        return cls.merge(settings)

    @classmethod
    def merge(cls, *layers: "Mapping[str, Any] | Config | None") -> "Config":
        """Reads several dictionaries of settings, the last one strongest. A null means "the default".

        Raises:
            ConfigError: settings are unknown, have values that cannot be, or contradict one another.
        """
        config, problems = cls._read(layers)
        if config is not None:
            problems += _contradictions(config)
        _refuse(problems)
        assert config is not None
        return config

    @classmethod
    def check(cls, settings: Any, *, source: str) -> None:
        """Refuses settings of a file that can never be used, whatever others are merged with them.

        Raises:
            ConfigError: one is unknown or has a value that cannot be, with the file's name.
        """
        if settings is not None and not isinstance(settings, Mapping):
            raise ConfigError(f"{source} holds no settings: write lines such as microbatches: 4")
        _refuse(cls._read([settings])[1], source=source)

    @classmethod
    def _read(
        cls, layers: "Iterable[Mapping[str, Any] | Config | None]"
    ) -> "tuple[Config | None, list[str]]":
        """The settings, if they can be read, and what is wrong with them."""
        problems: list[str] = []
        values: dict[str, Any] = {}
        ignored: list[str] = []
        for layer in layers:
            given = layer.given if isinstance(layer, Config) else dictionary_of(layer)
            ignored += ignored_names(given.pop("ignored", None))
            values |= canonical(given, known=cls.model_fields, problems=problems, ignored=ignored)
        given = {key: value for key, value in values.items() if value is not None}
        if ignored:
            given["ignored"] = tuple(dict.fromkeys(ignored))
        try:
            return cls.model_validate(given), problems
        except ValidationError as error:
            return None, problems + describe(error.errors(), root="the settings")

    def to_dict(self) -> dict[str, Any]:
        """A form that `json` can write and `parse` reads."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """The text of ``config.json`` in the run folder."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @property
    def given(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def pins(self) -> dict[str, Any]:
        """The planning settings that differ from their defaults."""
        given = self.given
        return {k: v for k, v in given.items() if k not in _NO_PINS and (k, v) != ("plan", ANEW)}

    @property
    def plan_file(self) -> str | None:
        """The plan file to follow, if there is one."""
        return None if self.plan == ANEW else self.plan

    @property
    def missing_ranks_s(self) -> float:
        """Seconds after which ranks that wait in a collective call name the missing ones."""
        return self.timeout_s / 30

    @property
    def balance_weight(self) -> float:
        """Share of memory in what the split balances; the rest is time.

        0 when speed is wanted and no weight is given: memory is then a limit, not a goal.
        """
        if self.memory_weight is not None:
            return self.memory_weight
        return 0.8 if self.optimize == "memory" else 0.0

    @property
    def goal_of_division(self) -> Literal["speed", "memory"]:
        """What ranks share layers for: who asks for a degree wants its memory, in a small model, too."""
        return "memory" if self.tensor_parallel_degree > 1 else self.optimize

    def between_units(self, mesh: Mesh) -> int | None:
        """The dimension along which ranks that share a batch cut the tensors between units; None: none."""
        if mesh.expert > 1 and mesh.context == 1:
            return 0
        is_cut = mesh.context > 1 or (mesh.tensor > 1 and self.sequence_parallel is True)
        return _SEQUENCES if is_cut else None

    def cut_again(self, mesh: Mesh) -> int | None:
        """The dimension along which the inner ranks of a grid cut what others have cut; None: none."""
        if mesh.inner == "ep":
            return 0
        is_cut = mesh.inner == "tp" and self.sequence_parallel is True
        return _SEQUENCES if is_cut else None

    def resolve_world(self, world_size: int) -> Mesh:
        """The grid of ranks in a world of this size.

        Pipeline ranks or replicas that are not set follow from the other degrees; with neither set, all ranks
        form one pipeline, or are replicas where they share their parameters.

        Raises:
            ConfigError: the degrees do not multiply to the number of ranks, or `default_partition` is no
                pipeline rank.

        >>> Config.parse({"partitions": 2}).resolve_world(8).data
        4
        """
        pipeline, data = self.pipeline_parallel_degree, self.data_parallel_degree
        shared = self.shared_degrees
        share = prod(shared.values())
        groups = world_size // share  # of ranks that share a batch
        if pipeline is None and data is None and self.sharded_data_parallel_degree > 1:
            data = groups
        if pipeline is None:
            pipeline = groups // (data or 1)
        elif data is None:
            data = groups // pipeline
        data = data or 1
        if pipeline < 1 or pipeline * data * share != world_size:
            raise ConfigError(self._equation(world_size))
        if self.default_partition is not None and self.default_partition >= pipeline:
            raise ConfigError(_outside_pipeline(self.default_partition, pipeline))
        mesh = Mesh.of(
            world_size=world_size,
            pipeline=pipeline,
            data=data,
            **shared,
            shard=self.sharded_data_parallel_degree,
            placement=self.placement_strategy,
        )
        self.num_updating(mesh)  # refuses what does not divide
        return mesh

    def num_updating(self, mesh: Mesh) -> int:
        """Replicas with the same rows that share the optimizer's state; 1: none do.

        Raises:
            ConfigError: the state is to be divided among a number that the grid does not have.

        >>> config = Config.parse({"shard_optimizer_state": 4, "sharded_data_parallel_degree": 2})
        >>> config.num_updating(config.resolve_world(16))
        2
        """
        wanted = self.shard_optimizer_state
        if isinstance(wanted, bool):
            return mesh.data // mesh.shard if wanted else 1
        if mesh.data % wanted or wanted % mesh.shard:
            allowed = (d for d in range(2, mesh.data + 1) if mesh.data % d == 0 and d % mesh.shard == 0)
            raise ConfigError(
                f"shard_optimizer_state is {wanted}, which does not divide the "
                f"{counted(mesh.data, 'replica')} of each stage, or is no multiple of "
                f"sharded_data_parallel_degree ({mesh.shard}). Use one of "
                f"{', '.join(['false', *map(str, allowed)])}."
            )
        return wanted // mesh.shard

    def _equation(self, world_size: int) -> str:
        """The degrees that do not multiply to the number of ranks, and what would."""
        degrees = {"pipeline": self.pipeline_parallel_degree, "data": self.data_parallel_degree}
        degrees |= {name: degree for name, degree in self.shared_degrees.items() if degree > 1}
        left = " * ".join(f"{name}({degree or '?'})" for name, degree in degrees.items())
        product = prod(degree or 1 for degree in degrees.values())
        start = f"a multiple of {product}" if None in degrees.values() else f"{product}"
        divisors = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
        choice = "1 for all degrees"
        if world_size > 1:
            choice = f"degrees whose product divides {world_size}, each one of {divisors}"
        return f"{left} != WORLD_SIZE({world_size}). Start {start} ranks, or choose {choice}."


def _refuse(problems: Sequence[str], *, source: str = "") -> None:
    begin = f"{source}: " if source else ""
    if len(problems) == 1:
        raise ConfigError(begin + problems[0])
    if problems:
        raise ConfigError(join(f"{begin}{len(problems)} settings cannot be used:", problems))


def refuse_misplaced(call: str, others: Mapping[str, Any], *, takes: Collection[str]) -> None:
    """Refuses options that a call does not have.

    >>> refuse_misplaced("@sw.step", {"split_list": ["x"]}, takes=["split_lists"])
    Traceback (most recent call last):
    shardwright.errors.UsageError: @sw.step has no option split_list. Did you mean split_lists?
    """
    for name, value in others.items():
        raise UsageError(f"{call} has no option {name}{_remedy(name, value, takes)}")


def _remedy(name: str, value: Any, takes: Collection[str]) -> str:
    if name in Config.model_fields or _is_other_name(name, value):
        text = f'sw.init({{"{name}": {shown(value)}}})'
        return f": it is a setting of the run. Write {text}, or shardwright run --set {name}={value}."
    close = get_close_matches(name, [*takes, *Config.model_fields], n=1, cutoff=0.6)
    if close and close[0] in takes:
        return f". Did you mean {close[0]}?"
    if close:
        return f". Did you mean the setting {close[0]} of sw.init?"
    return f": it has {', '.join(takes)}." if takes else ": it takes none of its own."


def _is_other_name(name: str, value: Any) -> bool:
    """Whether it is a setting by a name of another library, such as ``partitions``."""
    try:
        Config.parse({name: value})
    except ConfigError as error:
        return "is not a setting" not in str(error)
    return True
