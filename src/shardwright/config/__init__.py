"""The settings of a run."""

from shardwright.config.config import Config
from shardwright.config.settings import PipelineKind

__all__ = ["Config", "PipelineKind"]
