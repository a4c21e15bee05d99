"""The settings: their names, defaults, meanings and limits.

A planning setting that differs from its default is a *pin*: the planner keeps it, and chooses the rest.

Dictionaries in the style of SageMaker's model parallel library are accepted: ``partitions``,
``partition_file``, ``pipeline="simple"`` (all forwards first: gpipe), ``pipeline="interleaved"`` (backward
first: 1f1b), and ``-`` for ``_``. Settings of that library that change nothing here end up in
`Config.ignored`; settings for features that this version lacks are accepted at their defaults only.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from shardwright.errors import ConfigError
from shardwright.limits import (
    MOST_BYTES,
    MOST_ELEMENTS,
    MOST_MICROBATCHES,
    MOST_RANKS,
    MOST_SECONDS,
    MOST_STAGES_OF_RANK,
    MOST_STEPS,
)
from shardwright.mesh import Mesh, canonical_placement
from shardwright.printable import control_in, printable, shown
from shardwright.problems import describe, join
from shardwright.units import parse_bytes

__all__ = ["Config", "PipelineKind"]

PipelineKind = Literal["auto", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]

_RENAMED = {"partitions": "pipeline_parallel_degree"}

_PIPELINE_NAMES = {"simple": "gpipe", "interleaved": "1f1b"}

# Accepted with any value, because they change nothing here.
_WITHOUT_EFFECT = frozenset(
    {
        "_fp32_grad_accumulation",
        "_match_weights",
        "activation_loading_horizon",
        "checkpoint_attentions",
        "contiguous",
        "deterministic_server",
        "fast_mode",
        "fork",
        "overlapping_allreduce",
        "sdp_hierarchical_allgather",
        "skip_tracing",
        "static_mode",
        "xla",
    }
)

# Settings that the planner does not look at.
_NO_PINS = frozenset(
    (
        "allow_older ignored keep_freed_memory log_interval missing_ranks_s on_nonfinite pin_cores run_dir "
        "run_name seed shared_memory steps tensorboard timeout_s trace"
    ).split()
)

# Features of later versions: the value that means "off", and what to use instead.
_NOT_YET: dict[str, tuple[Any, str]] = {
    "delayed_parameter_initialization": (
        False,
        "build the model under sw.delay_param_initialization()",
    ),
    "fp16_params": (False, "cast the model with model.half()"),
    "horovod": (False, "use data_parallel_degree, which needs no Horovod"),
    "offload_activations": (False, "use activation_checkpointing"),
    "prescaled_batch": (False, "give each replica its own batch"),
    "tensor_parallel_degree": (1, "use a higher pipeline_parallel_degree"),
}


def _no_bool(value: Any) -> Any:
    # Without this, pydantic reads True as 1, and a slip in a dictionary becomes "one microbatch".
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def _no_control(value: str) -> str:
    if (control := control_in(value)) is not None:
        raise ValueError(f"it must not have control characters such as {control}")
    return value


_Whole = Annotated[int, BeforeValidator(_no_bool)]
Degree = Annotated[_Whole, Field(ge=1, le=MOST_RANKS)]
Microbatches = Annotated[_Whole, Field(ge=1, le=MOST_MICROBATCHES)]
Stages = Annotated[_Whole, Field(ge=1, le=MOST_STAGES_OF_RANK)]
Elements = Annotated[_Whole, Field(ge=1, le=MOST_ELEMENTS)]
Steps = Annotated[_Whole, Field(ge=1, le=MOST_STEPS)]
Seed = Annotated[_Whole, Field(ge=0, lt=2**63)]
Norm = Annotated[float, BeforeValidator(_no_bool), Field(gt=0.0, allow_inf_nan=False)]
Weight = Annotated[float, BeforeValidator(_no_bool), Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, BeforeValidator(_no_bool), Field(gt=0.0, le=MOST_SECONDS)]
Name = Annotated[str, AfterValidator(_no_control)]
Port = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=65535)]


class Config(BaseModel):
    """All settings of a run; make one with `Config.parse` or `Config.merge`.

    >>> config = Config.parse({"partitions": 2, "microbatches": 4, "pipeline": "interleaved"})
    >>> config.pipeline_parallel_degree, config.microbatches, config.pipeline
    (2, 4, '1f1b')
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pipeline_parallel_degree: Degree | None = Field(
        None,
        description="Pipeline ranks of one replica of the model; unset: all ranks / data_parallel_degree.",
    )
    data_parallel_degree: Degree | None = Field(
        None, description="Replicas of the model; unset: all ranks / pipeline_parallel_degree."
    )
    sharded_data_parallel_degree: Degree = Field(
        1,
        description="Size of a shard group (parameters, gradients and optimizer state); 1: no sharding.",
    )
    shard_optimizer_state: bool = Field(
        False, description="Shard optimizer state over all replicas: each updates a part of the parameters."
    )
    sdp_param_persistence_threshold: Annotated[_Whole, Field(ge=0, le=MOST_ELEMENTS)] = Field(
        10_000, description="Parameters with fewer elements are not sharded."
    )
    sdp_reduce_bucket_size: Elements = Field(
        5_000_000,
        description="Most elements of sharded parameters in one gradient bucket.",
    )
    sdp_max_live_parameters: Elements = Field(
        1_000_000_000,
        description="Most elements of sharded parameters that a rank keeps gathered from other hosts.",
    )
    sdp_reduce_every_microbatch: bool | None = Field(
        None,
        description="Reduce gradients of sharded parameters in each microbatch: no rank keeps whole ones; "
        "unset: where memory requires it.",
    )
    sdp_quantized_gradients: bool = Field(
        False, description="Send gradients of sharded parameters between hosts in 8 bits."
    )
    sdp_quantized_parameters: bool = Field(
        False, description="Send rows of sharded parameters between hosts in 8 bits."
    )
    sdp_gradient_clipping: Norm | None = Field(
        None,
        description="With sharded parameters, optimizer.step() clips all gradients to this norm.",
    )
    bf16: bool = Field(
        False, description="Parameters and activations in bfloat16; gradients and updates in float32."
    )
    fp16: bool = Field(False, description="The same in float16, with a loss scale: see DistributedOptimizer.")
    microbatches: Microbatches | None = Field(
        None, description="Microbatches of each batch; unset: the planner chooses."
    )
    batch_statistics: Literal["microbatch", "batch"] = Field(
        "microbatch",
        description="Samples of batch norms in training; batch: the whole batch, as one microbatch.",
    )
    pipeline: PipelineKind = Field("auto", description="Schedule family; auto: the planner chooses.")
    virtual_stages: Stages | None = Field(
        None, description="Stages on each pipeline rank; unset: the planner chooses."
    )
    active_microbatches: Microbatches | None = Field(
        None, description="Most microbatches in flight; unset: as the schedule needs."
    )
    optimize: Literal["speed", "memory"] = Field(
        "speed", description="Goal of the split: time under the memory limit, or mostly memory."
    )
    memory_weight: Weight | None = Field(
        None, description="Weight of memory against time in that goal, 0 to 1; unset: follows optimize."
    )
    auto_partition: bool = Field(True, description="The planner places the units; false: sw.partition does.")
    default_partition: Annotated[_Whole, Field(ge=0, lt=MOST_RANKS)] | None = Field(
        None, description="Pipeline rank of units outside any sw.partition; needed without auto_partition."
    )
    placement_strategy: str = Field(
        "DPT",
        description="Rank layout: cluster, spread or a permutation of D, P, T; the rightmost is fastest.",
    )
    plan: Name | None = Field(None, description="Plan file to follow instead of planning.")
    ddp: bool | None = Field(None, description="Data parallelism; false: refuse more than one replica.")
    ddp_port: Port | None = Field(
        None, description="TCP port at which rank 0 serves the rendezvous, without MASTER_PORT."
    )
    ddp_dist_backend: Literal["auto", "nccl", "gloo"] = Field(
        "auto",
        description="torch.distributed backend; auto: nccl on GPUs, own collectives and gloo on CPUs.",
    )
    activation_checkpointing: Literal["auto", "none", "full"] = Field(
        "auto", description="Recompute activations: only where memory requires it, never, or everywhere."
    )
    memory_limit: Annotated[int, Field(le=MOST_BYTES)] | None = Field(
        None, description="Memory of one rank, as bytes or text (6GiB); unset: the device's, or its share."
    )
    profile: Literal["measured", "estimated"] = Field(
        "measured", description="Time the units, or estimate them from their FLOPs and bytes."
    )
    plan_one_stage: bool = Field(
        False,
        description="Choose microbatches and recomputation with one stage, too, and predict the step.",
    )
    calibrate: bool = Field(
        True,
        description="Record measured step times, and correct predictions by them.",
    )
    run_dir: Name = Field("runs", description="Folder that holds the run folders.")
    run_name: Name | None = Field(None, description="Name of the run folder; unset: made from the time.")
    timeout_s: Seconds = Field(300.0, description="Seconds after which a silent peer counts as lost.")
    missing_ranks_s: Seconds = Field(
        10.0, description="Seconds after which ranks that wait in a collective call name the missing ones."
    )
    allow_older: bool = Field(
        False, description="Resume from an older checkpoint if the newest is damaged, with a warning."
    )
    on_nonfinite: Literal["stop", "skip", "ignore"] = Field(
        "stop",
        description="If a loss or gradient is NaN or infinite: end the run (exit code 7), skip the "
        "update, or ignore it.",
    )
    seed: Seed | None = Field(None, description="Seed of the random generators; unset: left alone.")
    pin_cores: bool = Field(
        True, description="On CPUs, pin every rank to its own cores during a step, if there are enough."
    )
    shared_memory: bool = Field(
        True,
        description="On CPUs, pass messages and parameters on one host through shared memory.",
    )
    keep_freed_memory: bool = Field(
        True,
        description="On CPUs, keep freed memory for the next step instead of returning it to the system.",
    )
    trace: bool = Field(False, description="Write a timeline (trace.json).")
    report: bool = Field(True, description="Write report.html when the run ends.")
    tensorboard: bool = Field(False, description="Write TensorBoard event files.")
    log_interval: Steps = Field(10, description="Steps between console lines.")
    steps: Steps | None = Field(
        None, description="Steps of the whole run, for the time left on these lines; unset: not shown."
    )
    ignored: tuple[str, ...] = Field((), description="Settings that were given and change nothing here.")

    @field_validator("pipeline", mode="before")
    @classmethod
    def _pipeline_name(cls, value: Any) -> Any:
        return _PIPELINE_NAMES.get(value, value) if isinstance(value, str) else value

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _checkpointing_switch(cls, value: Any) -> Any:
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value

    @field_validator("placement_strategy")
    @classmethod
    def _placement(cls, value: str) -> str:
        try:
            return canonical_placement(value)
        except ConfigError:
            raise ValueError("it must be cluster, spread or a permutation of D, P, T such as DPT") from None

    @field_validator("memory_limit", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if value is None:
            return None
        try:
            num_bytes = parse_bytes(_no_bool(value))
        except ConfigError:
            num_bytes = 0
        if num_bytes < 1:
            raise ValueError("it must be a size such as 6GiB or 500MB, or a number of bytes")
        return num_bytes

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
            ConfigError: as `parse`.
        """
        config, problems = cls._read(layers)
        if config is not None:
            problems += config._contradictions()
        _refuse(problems)
        assert config is not None
        return config

    @classmethod
    def check(cls, settings: Any, *, source: str) -> None:
        """Refuses settings of a file that can never be used, whatever others are merged with them.

        Args:
            settings: what the file holds.
            source: names the file.

        Raises:
            ConfigError: as `parse`; the message begins with the file.
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
            given = layer._given() if isinstance(layer, Config) else _dictionary(layer)
            ignored += _names(given.pop("ignored", None))
            values |= _canonical(given, problems=problems, ignored=ignored)
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
    def pins(self) -> dict[str, Any]:
        """The planning settings that differ from their defaults."""
        given = self._given()
        return {key: value for key, value in given.items() if key not in _NO_PINS}

    @property
    def balance_weight(self) -> float:
        """Share of memory in what the split balances; the rest is time.

        0 when speed is wanted and no weight is given: memory is then a limit, not a goal.
        """
        if self.memory_weight is not None:
            return self.memory_weight
        return 0.8 if self.optimize == "memory" else 0.0

    def resolve_world(self, world_size: int) -> Mesh:
        """The grid of ranks in a world of this size.

        A degree that is not set follows from the other; with neither set, all ranks form one pipeline, or are
        replicas where they share their parameters.

        Raises:
            ConfigError: the degrees do not multiply to the number of ranks, or `default_partition` is no
                pipeline rank.

        >>> Config.parse({"partitions": 2}).resolve_world(8).data
        4
        """
        pipeline, data = self.pipeline_parallel_degree, self.data_parallel_degree
        if pipeline is None and data is None and self.sharded_data_parallel_degree > 1:
            data = world_size
        if pipeline is None:
            pipeline, rest = divmod(world_size, data or 1)
        elif data is None:
            data, rest = divmod(world_size, pipeline)
        else:
            rest = world_size - pipeline * data
        data = data or 1
        if rest or pipeline < 1 or pipeline * data != world_size:
            raise ConfigError(_equation(self.pipeline_parallel_degree, self.data_parallel_degree, world_size))
        if self.ddp is False and data > 1:
            raise ConfigError(
                f"ddp is false, but pipeline({pipeline}) on {world_size} ranks makes {data} replicas. "
                f"Remove ddp, or start {pipeline} rank{'s' if pipeline > 1 else ''}."
            )
        if self.default_partition is not None and self.default_partition >= pipeline:
            raise ConfigError(_default_partition_problem(self.default_partition, pipeline))
        return Mesh.of(
            world_size=world_size,
            pipeline=pipeline,
            data=data,
            shard=self.sharded_data_parallel_degree,
            placement=self.placement_strategy,
        )

    def _given(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_defaults=True)

    def _contradictions(self) -> Iterator[str]:
        degree = self.pipeline_parallel_degree
        if not self.auto_partition and self.default_partition is None and self.plan is None:
            yield (
                "auto_partition is false, but default_partition is not set: units outside any "
                "sw.partition need a place. Set default_partition, for example 0."
            )
        if degree is not None and self.default_partition is not None and self.default_partition >= degree:
            yield _default_partition_problem(self.default_partition, degree)
        if self.ddp is False and (self.data_parallel_degree or 1) > 1:
            yield (
                f"ddp is false, but data_parallel_degree is {self.data_parallel_degree}. "
                "Remove ddp, or set data_parallel_degree 1."
            )
        if self.ddp is False and (self.ddp_port is not None or self.ddp_dist_backend != "auto"):
            given = "ddp_port" if self.ddp_port is not None else "ddp_dist_backend"
            yield f"{given} is set, but ddp is false. Remove one of the two."
        if self.bf16 and self.fp16:
            yield "bf16 and fp16 are both set, but parameters have one type. Remove one of the two."
        stages = self.virtual_stages
        if stages is not None and not self.auto_partition:
            yield (
                f"virtual_stages is {stages}, but auto_partition is false: sw.partition says what runs "
                "where, and so how many stages there are. Remove one of the two."
            )
        if stages is not None and stages > 1 and self.pipeline in ("gpipe", "1f1b", "zb_h1"):
            yield (
                f"virtual_stages is {stages}, but pipeline {self.pipeline} runs one stage on each rank. "
                "Use interleaved_1f1b, or set virtual_stages 1."
            )
        if stages is not None and stages != 2 and self.pipeline == "zb_v":
            yield f"virtual_stages is {stages}, but pipeline zb_v runs 2 stages on each rank. Remove one."


def _refuse(problems: Sequence[str], *, source: str = "") -> None:
    begin = f"{source}: " if source else ""
    if len(problems) == 1:
        raise ConfigError(begin + problems[0])
    if problems:
        raise ConfigError(join(f"{begin}{len(problems)} settings cannot be used:", problems))


def _dictionary(layer: Any) -> dict[Any, Any]:
    if layer is not None and not isinstance(layer, Mapping):
        raise ConfigError(
            f"the settings are {shown(layer)}, but they must be a dictionary such as {{'microbatches': 4}}."
        )
    return dict(layer or {})


def _names(given: Any) -> list[str]:
    if given is not None and not isinstance(given, list | tuple):
        raise ConfigError(f"ignored is {shown(given)}, but it must be a list of names of settings.")
    return [printable(str(name)) for name in given or ()]


def _canonical(given: Mapping[str, Any], *, problems: list[str], ignored: list[str]) -> dict[str, Any]:
    """Our names for one layer of settings; adds to `problems` and `ignored`."""
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for raw_key, value in given.items():
        key = str(raw_key).replace("-", "_")
        if key in _WITHOUT_EFFECT:
            ignored.append(key)
        elif key in _NOT_YET:
            if value is not None and not _same(value, _NOT_YET[key][0]):
                problems.append(_not_yet(key, value))
        elif (name := _RENAMED.get(key, key)) in found and not _same(found[name], value):
            problems.append(
                f"{origin[name]} is {shown(found[name])}, but {printable(str(raw_key))} is {shown(value)}: "
                "they are two names of one setting. Give one of them."
            )
        elif name in Config.model_fields or key in ("load_partition", "partition_file"):
            found[name], origin[name] = value, str(raw_key)
        else:
            problems.append(_unknown(str(raw_key), key))
    _plan_file(found, problems)
    return found


def _plan_file(found: dict[str, Any], problems: list[str]) -> None:
    """Turns `load_partition` and `partition_file` into `plan`."""
    load, file = found.pop("load_partition", None), found.pop("partition_file", None)
    wanted = None if load is None else not _same(load, False)
    plan = found.get("plan")
    if file is not None and plan is not None and not _same(file, plan):
        problems.append(
            f"partition_file is {shown(file)}, but plan is {shown(plan)}: they are two names of one setting."
        )
    elif wanted is True and file is None and plan is None:
        problems.append("load_partition is true, but no file is given. Set plan to the path of a plan file.")
    elif wanted is False and (file is not None or plan is not None):
        key = "partition_file" if file is not None else "plan"
        problems.append(
            f"load_partition is false, but {key} is {shown(file or plan)}. Remove one of the two."
        )
    elif file is not None:
        found["plan"] = file


def _same(a: Any, b: Any) -> bool:
    """Equal, also where one came as text from a command line."""
    return bool(a == b) or shown(a).strip("'").lower() == shown(b).strip("'").lower()


def _unknown(raw_key: str, key: str) -> str:
    known = [*Config.model_fields, *_RENAMED, *_NOT_YET, *_WITHOUT_EFFECT, "load_partition", "partition_file"]
    close = get_close_matches(key, known, n=1, cutoff=0.6)
    return f"{printable(raw_key)} is not a setting. " + (
        f"Did you mean {close[0]}?" if close else "Remove it."
    )


def _not_yet(key: str, value: Any) -> str:
    off, instead = _NOT_YET[key]
    only = f"this version does not have it yet (only {off!r})"
    return f"{key} is {shown(value)}, but {only}. Remove it, or {instead}."


def _default_partition_problem(default: int, degree: int) -> str:
    return (
        f"default_partition is {default}, but pipeline_parallel_degree is {degree}: "
        f"pipeline ranks run from 0 to {degree - 1}."
    )


def _equation(pipeline: int | None, data: int | None, world_size: int) -> str:
    left = f"pipeline({pipeline or '?'}) * data({data or '?'}) != WORLD_SIZE({world_size})"
    product = (pipeline or 1) * (data or 1)
    unknown = pipeline is None or data is None
    start = f"a multiple of {product}" if unknown else f"{product}"
    divisors = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
    choice = f"degrees that divide {world_size}: {divisors}" if world_size > 1 else "1 for all degrees"
    return f"{left}. Start {start} ranks, or choose {choice}."
