"""``smp.DistributedModel``."""

import os
from typing import Any

import shardwright.tensorflow as sw
from shardwright.tensorflow.keras_run import keras_run
from smdistributed.modelparallel.ranks_of_run import present_run


class DistributedModel(sw.DistributedModel):
    """A Keras model whose layers the ranks share: subclass it in the place of ``tf.keras.Model``."""

    _wraps_models = True

    def __init__(self, *args: Any, **kwargs: Any):
        present_run()
        super().__init__(*args, **kwargs)

    def profile(self, *inputs: Any, **kwargs: Any) -> None:
        """Calls the model, so that it is built before the first step; afterwards it does nothing.

        The planner counts the work of each layer in the first step's own graph.
        """
        if not keras_run().is_placed:
            self(*inputs, **kwargs)

    def save_model(self, save_path: "str | os.PathLike[str]" = "/opt/ml/model") -> None:
        """Writes the whole model as a SavedModel: `shardwright.tensorflow.DistributedModel.save_model`."""
        super().save_model(save_path)
