"""The settings: their names, defaults, meanings and limits.

A planning setting that differs from its default is a *pin*: the planner keeps it, and chooses the rest.

``pipeline`` has the names of SageMaker's model parallel library, too: ``simple`` (all forwards first: gpipe)
and ``interleaved`` (backward first: 1f1b). `shardwright.config.names` has those of settings.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from shardwright.config.names import canonical, dictionary_of, ignored_names
from shardwright.config.values import (
    Degree,
    Elements,
    Microbatches,
    Name,
    Norm,
    Port,
    Seconds,
    Seed,
    Stages,
    Steps,
    Units,
    Weight,
    Whole,
    no_bool,
)
from shardwright.errors import ConfigError
from shardwright.limits import MOST_BYTES, MOST_DIMS, MOST_ELEMENTS, MOST_RANKS
from shardwright.mesh import Mesh, canonical_placement
from shardwright.problems import describe, join
from shardwright.quantities import parse_bytes

__all__ = ["Config", "PipelineKind"]

PipelineKind = Literal["auto", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]

_PIPELINE_NAMES = {"simple": "gpipe", "interleaved": "1f1b"}

# Settings that the planner does not look at.
_NO_PINS = frozenset(
    (
        "allow_older ignored keep_freed_memory log_interval measure_s missing_ranks_s offload_dir "
        "on_nonfinite pin_cores plan_anew run_dir run_name seed shared_memory steps tensorboard timeout_s "
        "trace trackers"
    ).split()
)


class Config(BaseModel):
    """All settings of a run; make one with `Config.parse` or `Config.merge`.

    >>> config = Config.parse({"partitions": 2, "microbatches": 4, "pipeline": "interleaved"})
    >>> config.pipeline_parallel_degree, config.microbatches, config.pipeline
    (2, 4, '1f1b')
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pipeline_parallel_degree: Degree | None = Field(
        None,
        description="Pipeline ranks of one replica of the model; unset: all ranks / the other degrees.",
    )
    data_parallel_degree: Degree | None = Field(
        None, description="Replicas of the model; unset: all ranks / the other degrees."
    )
    tensor_parallel_degree: Degree = Field(
        1, description="Ranks that share every layer of a stage, each with a part; 1: no tensor parallelism."
    )
    context_parallel_degree: Degree = Field(
        1,
        description="Ranks that share the sequences of a batch, each with a part of every sequence; 1: no "
        "context parallelism.",
    )
    expert_parallel_degree: Degree = Field(
        1,
        description="Ranks that share the experts of every layer, and the samples of a batch; 1: no expert "
        "parallelism.",
    )
    sequence_parallel: bool | Literal["auto"] = Field(
        False,
        description="Tensor-parallel ranks cut tensors between layers along the sequence, too: norms and "
        'residuals are divided; "auto": where the predicted step is shorter so, or fits in memory.',
    )
    sequence_dim: Annotated[Whole, Field(ge=0, le=MOST_DIMS)] = Field(
        1, description="The dimension of tensors along which sequences are cut, from 0."
    )
    sharded_data_parallel_degree: Degree = Field(
        1,
        description="Size of a shard group (parameters, gradients and optimizer state); 1: no sharding.",
    )
    shard_optimizer_state: bool = Field(
        False, description="Shard optimizer state over all replicas: each updates a part of the parameters."
    )
    sdp_param_persistence_threshold: Annotated[Whole, Field(ge=0, le=MOST_ELEMENTS)] = Field(
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
    default_partition: Annotated[Whole, Field(ge=0, lt=MOST_RANKS)] | None = Field(
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
    offload_activations: bool | Literal["auto"] = Field(
        False,
        description="Offload what units keep for their backward: to the host's memory from GPUs, to a file "
        "from CPUs; auto: where memory requires it.",
    )
    activation_loading_horizon: Units = Field(
        2, description="Units ahead of their backward that come back; as many may be leaving at once."
    )
    offload_dir: Name | None = Field(
        None,
        description="Folder of that file; unset: that of temporary files, or run_dir if it is in memory.",
    )
    memory_limit: Annotated[int, Field(le=MOST_BYTES)] | None = Field(
        None, description="Memory of one rank, as bytes or text (6GiB); unset: the device's, or its share."
    )
    profile: Literal["measured", "estimated"] = Field(
        "measured", description="Time the units, or estimate them from their FLOPs and bytes."
    )
    measure_s: Seconds = Field(
        5.0,
        description="Seconds that timing may take at the start; what is not timed by then is inferred. Times "
        "of earlier runs are remembered.",
    )
    plan_anew: bool = Field(
        False,
        description="Choose microbatches and stages anew, without the last run of this script and what it "
        "taught.",
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
    run_name: Name | None = Field(None, description="Name of the run folder; unset: that of the script.")
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
    trackers: tuple[Literal["csv", "mlflow", "tensorboard", "wandb"], ...] = Field(
        (), description="Tools that get a copy of the metrics: csv, mlflow, tensorboard, wandb."
    )
    log_interval: Steps | None = Field(
        None, description="Steps between console lines; unset: one that is updated, or one each 10 s."
    )
    steps: Steps | None = Field(
        None, description="Steps of the whole run, for the time left on these lines; unset: not shown."
    )
    ignored: tuple[str, ...] = Field((), description="Settings that were given and change nothing here.")

    @field_validator("pipeline", mode="before")
    @classmethod
    def _pipeline_name(cls, value: Any) -> Any:
        return _PIPELINE_NAMES.get(value, value) if isinstance(value, str) else value

    @field_validator("trackers", mode="before")
    @classmethod
    def _tracker_names(cls, value: Any) -> Any:
        return (
            [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
        )

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
            num_bytes = parse_bytes(no_bool(value))
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
            given = layer._given() if isinstance(layer, Config) else dictionary_of(layer)
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

    @property
    def goal_of_division(self) -> Literal["speed", "memory"]:
        """What ranks share layers for: who asks for a degree wants its memory, in a small model, too."""
        return "memory" if self.tensor_parallel_degree > 1 else self.optimize

    def between_units(self, mesh: Mesh) -> int | None:
        """The dimension along which ranks that share a batch cut the tensors between units; None: none."""
        if mesh.expert > 1 and mesh.context == 1:
            return 0
        is_cut = mesh.context > 1 or (mesh.tensor > 1 and self.sequence_parallel is True)
        return self.sequence_dim if is_cut else None

    def cut_again(self, mesh: Mesh) -> int | None:
        """The dimension along which the inner ranks of a grid cut what others have cut; None: none."""
        if mesh.inner == "ep":
            return 0
        is_cut = mesh.inner == "tp" and mesh.expert == 1 and self.sequence_parallel is True
        return self.sequence_dim if is_cut else None

    @property
    def _shared(self) -> dict[str, int]:
        """The degrees of ranks that share a batch."""
        return {
            "context": self.context_parallel_degree,
            "expert": self.expert_parallel_degree,
            "tensor": self.tensor_parallel_degree,
        }

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
        shared = self._shared
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
        if self.ddp is False and data > 1:
            model = f"pipeline({pipeline})"
            model += "".join(f" * {name}({degree})" for name, degree in shared.items() if degree > 1)
            raise ConfigError(
                f"ddp is false, but {model} on {world_size} ranks makes {data} replicas. "
                f"Remove ddp, or start {pipeline * share} rank{'s' if pipeline * share > 1 else ''}."
            )
        if self.default_partition is not None and self.default_partition >= pipeline:
            raise ConfigError(_default_partition_problem(self.default_partition, pipeline))
        return Mesh.of(
            world_size=world_size,
            pipeline=pipeline,
            data=data,
            **shared,
            shard=self.sharded_data_parallel_degree,
            placement=self.placement_strategy,
        )

    def _equation(self, world_size: int) -> str:
        """The degrees that do not multiply to the number of ranks, and what would."""
        degrees = {"pipeline": self.pipeline_parallel_degree, "data": self.data_parallel_degree}
        degrees |= {name: degree for name, degree in self._shared.items() if degree > 1}
        left = " * ".join(f"{name}({degree or '?'})" for name, degree in degrees.items())
        product = prod(degree or 1 for degree in degrees.values())
        start = f"a multiple of {product}" if None in degrees.values() else f"{product}"
        divisors = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
        choice = "1 for all degrees"
        if world_size > 1:
            choice = f"degrees whose product divides {world_size}, each one of {divisors}"
        return f"{left} != WORLD_SIZE({world_size}). Start {start} ranks, or choose {choice}."

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
        yield from self._contradictions_of_sharing()
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

    @property
    def _shares_layers_and_experts(self) -> bool:
        return min(self.tensor_parallel_degree, self.expert_parallel_degree) > 1

    def _contradictions_of_sharing(self) -> Iterator[str]:
        """What cannot be, of ranks that share a batch."""
        above = {f"{name}_parallel_degree": degree for name, degree in self._shared.items() if degree > 1}
        if len(above) > 2:
            given = " and ".join(f"{name} {degree}" for name, degree in above.items())
            yield (
                f"{given} are set, but ranks share a batch in two ways at most. Set one of them to 1; any "
                "two go together."
            )
        elif self._shares_layers_and_experts and self.sequence_parallel is True:
            yield (
                f"sequence_parallel is true, but expert_parallel_degree is {self.expert_parallel_degree}: "
                "ranks that share experts cut a batch by its samples. Set one of the two to its default."
            )


def _refuse(problems: Sequence[str], *, source: str = "") -> None:
    begin = f"{source}: " if source else ""
    if len(problems) == 1:
        raise ConfigError(begin + problems[0])
    if problems:
        raise ConfigError(join(f"{begin}{len(problems)} settings cannot be used:", problems))


def _default_partition_problem(default: int, degree: int) -> str:
    return (
        f"default_partition is {default}, but pipeline_parallel_degree is {degree}: "
        f"pipeline ranks run from 0 to {degree - 1}."
    )
