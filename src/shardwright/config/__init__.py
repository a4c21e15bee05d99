"""The settings of a run."""

from shardwright.config.settings import Config, PipelineKind

__all__ = ["Config", "PipelineKind"]
