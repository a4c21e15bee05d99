"""Training jobs for scripts of TensorFlow."""

import os
from pathlib import Path
from typing import Any, Literal

from shardwright.errors import ConfigError
from shardwright.launch.estimator import Estimator
from shardwright.launch.jobs.channels import local_path

__all__ = ["TensorFlow"]


class TensorFlow(Estimator):
    """Trains with a script for TensorFlow: arguments as for `Estimator`, and one more.

    ::

        estimator = TensorFlow(
            entry_point="train.py",
            framework_version="2.6",
            py_version="py38",
            instance_type="local",
            distribution={
                "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}},
                "mpi": {"enabled": True, "processes_per_host": 4},
            },
        )

    Args:
        entry_point: the script.
        model_dir: what the script gets as ``--model_dir``, as those for SageMaker expect: an address, or a
            folder; None for the folder of the job's model; False for none.
        arguments: as for `Estimator`.

    Raises:
        ConfigError: as for `Estimator`.
    """

    def __init__(
        self,
        entry_point: str | os.PathLike[str],
        *,
        model_dir: str | os.PathLike[str] | Literal[False] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(entry_point, **arguments)
        if isinstance(model_dir, bool) and model_dir:
            raise ConfigError("model_dir is True, but it must be a folder, False for none, or None.")
        self.model_dir = model_dir

    def _of_framework(self, job_name: str) -> dict[str, Any]:
        if self.model_dir is False:
            return {}
        if self.model_dir is not None:
            given = os.fspath(self.model_dir)
            return {"model_dir": str(local_path(given, what="model_dir", s3_to_local=self.s3_to_local))}
        return {"model_dir": str(Path(self.output_path).absolute() / job_name / "model")}
