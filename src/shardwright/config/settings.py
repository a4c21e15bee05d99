"""The settings: their names, defaults, meanings and limits.

``pipeline`` has the names of SageMaker's model parallel library, too: ``simple`` (all forwards first: gpipe)
and ``interleaved`` (backward first: 1f1b). `shardwright.config.names` has those of settings.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from shardwright.errors import ConfigError
from shardwright.mesh import canonical_placement
from shardwright.problems import no_bool
from shardwright.quantities import (
    MOST_BYTES,
    MOST_ELEMENTS,
    MOST_MICROBATCHES,
    MOST_RANKS,
    MOST_SECONDS,
    MOST_STAGES_OF_RANK,
    MOST_STEPS,
    MOST_UNITS,
    parse_bytes,
)
from shardwright.text import control_in, shown


def _no_control(value: str) -> str:
    if (control := control_in(value)) is not None:
        raise ValueError(f"it must not have control characters such as {control}")
    return value


def _all_or_some(value: Any) -> Any:
    """A switch, which some write as 0 or 1, or a number of ranks."""
    if isinstance(value, int) and 0 <= value <= MOST_RANKS:
        return bool(value) if value < 2 else value
    if str(value).lower() not in ("true", "false"):
        raise ValueError("it must be true, false or a number of replicas")
    return value


Whole = Annotated[int, BeforeValidator(no_bool)]
Degree = Annotated[Whole, Field(ge=1, le=MOST_RANKS)]
Microbatches = Annotated[Whole, Field(ge=1, le=MOST_MICROBATCHES)]
Stages = Annotated[Whole, Field(ge=1, le=MOST_STAGES_OF_RANK)]
Pieces = Annotated[Whole, Field(ge=1, le=MOST_MICROBATCHES)]
Elements = Annotated[Whole, Field(ge=1, le=MOST_ELEMENTS)]
Steps = Annotated[Whole, Field(ge=1, le=MOST_STEPS)]
Units = Annotated[Whole, Field(ge=1, le=MOST_UNITS)]
Seed = Annotated[Whole, Field(ge=0, lt=2**63)]
Norm = Annotated[float, BeforeValidator(no_bool), Field(gt=0.0, allow_inf_nan=False)]
Weight = Annotated[float, BeforeValidator(no_bool), Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, BeforeValidator(no_bool), Field(ge=0.001, le=MOST_SECONDS)]
Name = Annotated[str, AfterValidator(_no_control)]
Port = Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=65535)]


PipelineKind = Literal["auto", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]

_PIPELINE_NAMES = {"simple": "gpipe", "interleaved": "1f1b"}


class Settings(BaseModel):
    """The fields of `Config`; each value is within its own limits."""

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
    sharded_data_parallel_degree: Degree = Field(
        1,
        description="Size of a shard group (parameters, gradients and optimizer state); 1: no sharding.",
    )
    shard_optimizer_state: Annotated[bool | int, BeforeValidator(_all_or_some)] = Field(
        False,
        description="Shard optimizer state over all replicas, or over a number of neighbours: each updates a "
        "part of the parameters.",
    )
    optimizer_state: Literal["as_is", "bf16", "8bit"] = Field(
        "as_is",
        description="How the averages of an optimizer of torch.optim are kept: as it keeps them; or, rounded "
        "by chance, in bfloat16 (bf16) or in 8 bits with a scale for each 256 (8bit).",
    )
    offload_optimizer: bool = Field(
        False,
        description="With accelerators, keep the optimizer's state, and the weights that it updates, in the "
        "host's memory, and update there.",
    )
    sdp_param_persistence_threshold: Annotated[Whole, Field(ge=0, le=MOST_ELEMENTS)] = Field(
        10_000, description="Parameters with fewer elements are not sharded."
    )
    sdp_max_live_parameters: Elements = Field(
        1_000_000_000,
        description="Most elements of sharded parameters that a rank keeps gathered from other hosts.",
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
    plan: Name | None = Field(
        None,
        description="Plan file to follow; unset: the plan of the last run of this script, if there is one; "
        "anew: a new plan.",
    )
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
    loss_chunks: Literal["auto", "off"] | Pieces = Field(
        "auto",
        description="Pieces in which the logits of a linear head are computed for a loss, and go back: they "
        "never stand in memory whole. auto: where they are large.",
    )
    replay: Literal["auto", "off"] = Field(
        "auto",
        description="Run microbatches from a list of the calls that earlier ones have made, without the "
        "Python between units: where that has no effects of its own, or never.",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "off",
        description="Compile the units of each rank, as model.compile() does; auto, never tried on a GPU: "
        "only there, where units that a plan times both ways take less time so.",
    )
    offload_activations: bool | Literal["auto"] = Field(
        False,
        description="Offload what units keep for their backward: to the host's memory from GPUs, to a file "
        "in TMPDIR (or run_dir, if that is in memory) from CPUs; auto: where memory requires it.",
    )
    activation_loading_horizon: Units = Field(
        2, description="Units ahead of their backward that come back; as many may be leaving at once."
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
    plan_one_stage: bool = Field(
        False,
        description="Choose microbatches and recomputation with one stage, too, and predict the step.",
    )
    run_dir: Name = Field("runs", description="Folder that holds the run folders.")
    run_name: Name | None = Field(None, description="Name of the run folder; unset: that of the script.")
    timeout_s: Seconds = Field(
        300.0,
        description="Seconds after which a silent peer counts as lost; after a thirtieth of them, ranks that "
        "wait in a collective call name the missing ones.",
    )
    on_nonfinite: Literal["stop", "skip", "ignore"] = Field(
        "stop",
        description="If a loss or gradient is NaN or infinite: end the run (exit code 7), skip the "
        "update, or ignore it.",
    )
    seed: Seed | None = Field(None, description="Seed of the random generators; unset: left alone.")
    shared_memory: bool = Field(
        True,
        description="On CPUs, pass messages and parameters on one host through shared memory.",
    )
    trace: bool = Field(False, description="Write a timeline (trace.json).")
    report: bool = Field(True, description="Write report.html when the run ends.")
    trackers: tuple[Literal["mlflow", "tensorboard", "wandb"], ...] = Field(
        (), description="Tools that get a copy of the metrics: mlflow, tensorboard, wandb."
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

    @field_validator("replay", "loss_chunks", mode="before")
    @classmethod
    def _replay_switch(cls, value: Any) -> Any:
        # YAML reads off as false.
        return {True: "auto", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("compile", mode="before")
    @classmethod
    def _compile_switch(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

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
        if num_bytes < 1000:  # of a number without a unit
            raise ValueError(f"{shown(value)} means bytes, which holds no model: write a unit, as in 8GiB")
        return num_bytes

    @property
    def shared_degrees(self) -> dict[str, int]:
        """The degrees of ranks that share a batch."""
        return {
            "context": self.context_parallel_degree,
            "expert": self.expert_parallel_degree,
            "tensor": self.tensor_parallel_degree,
        }
