"""Settings that cannot go together."""

from collections.abc import Iterator

from shardwright.config.settings import Settings

__all__ = ["contradictions", "outside_pipeline"]


def contradictions(settings: Settings) -> Iterator[str]:
    """What the settings ask for together and cannot be had: one text for each, with its remedy."""
    degree = settings.pipeline_parallel_degree
    if not settings.auto_partition and settings.default_partition is None and settings.plan is None:
        yield (
            "auto_partition is false, but default_partition is not set: units outside any "
            "sw.partition need a place. Set default_partition, for example 0."
        )
    if degree is not None and settings.default_partition is not None and settings.default_partition >= degree:
        yield outside_pipeline(settings.default_partition, degree)
    yield from _of_sharing(settings)
    if settings.ddp is False and (settings.data_parallel_degree or 1) > 1:
        yield (
            f"ddp is false, but data_parallel_degree is {settings.data_parallel_degree}. "
            "Remove ddp, or set data_parallel_degree 1."
        )
    if settings.ddp is False and (settings.ddp_port is not None or settings.ddp_dist_backend != "auto"):
        given = "ddp_port" if settings.ddp_port is not None else "ddp_dist_backend"
        yield f"{given} is set, but ddp is false. Remove one of the two."
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


def outside_pipeline(default: int, degree: int) -> str:
    """The error for a `default_partition` that is no pipeline rank."""
    return (
        f"default_partition is {default}, but pipeline_parallel_degree is {degree}: "
        f"pipeline ranks run from 0 to {degree - 1}."
    )
