"""Every use of private TensorFlow and Keras, with the reason.

Tried with TensorFlow 2.21, Keras 3.15 and tf_keras 2.21. `tests/on_tensorflow/test_private.py` has a canary
for each: a new version that changes one of them fails there.
"""

from shardwright.tensorflow._private.checkpoints import SavedObject, saved_graph, saved_objects
from shardwright.tensorflow._private.functions import added, direct_call, replaced
from shardwright.tensorflow._private.graphs import (
    functions_inlined,
    give_instead,
    gradients_told,
    is_stateful,
    line_of,
    operations_told,
    outside_of_functions,
)
from shardwright.tensorflow._private.keras import (
    backups_left_to_another,
    boards_left_to_another,
    count_batch,
    is_building,
    keras_model_class,
    layers_of,
    layers_told,
    new_layers_told,
    parts_called,
    stays_without_slots,
    steps_per_execution,
    uses_keras_3,
    variables_without_metrics,
    weights_logged,
)
from shardwright.tensorflow._private.loss_scales import (
    loss_scale_classes,
    replaced_finite_check,
    scaled_optimizer,
    scales_made_early,
    update_scale,
)
from shardwright.tensorflow._private.optimizers import (
    count_update,
    has_slots,
    is_slot,
    make_slots,
    optimizer_bases,
    optimizer_classes,
    optimizer_v2_key,
    optimizer_variables,
    replaced_global_norm,
    slots_of,
)
from shardwright.tensorflow._private.variables import (
    given_back,
    given_up,
    made_without_value,
    without_autocast,
)

__all__ = [
    "SavedObject",
    "added",
    "backups_left_to_another",
    "boards_left_to_another",
    "count_batch",
    "count_update",
    "direct_call",
    "functions_inlined",
    "give_instead",
    "given_back",
    "given_up",
    "gradients_told",
    "has_slots",
    "is_building",
    "is_slot",
    "is_stateful",
    "keras_model_class",
    "layers_of",
    "layers_told",
    "line_of",
    "loss_scale_classes",
    "made_without_value",
    "make_slots",
    "new_layers_told",
    "operations_told",
    "optimizer_bases",
    "optimizer_classes",
    "optimizer_v2_key",
    "optimizer_variables",
    "outside_of_functions",
    "parts_called",
    "replaced",
    "replaced_finite_check",
    "replaced_global_norm",
    "saved_graph",
    "saved_objects",
    "scaled_optimizer",
    "scales_made_early",
    "slots_of",
    "stays_without_slots",
    "steps_per_execution",
    "update_scale",
    "uses_keras_3",
    "variables_without_metrics",
    "weights_logged",
    "without_autocast",
]
