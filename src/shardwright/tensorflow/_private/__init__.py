"""Every use of private TensorFlow and Keras, with the reason.

Tried with TensorFlow 2.21, Keras 3.15 and tf_keras 2.21. A new version that changes one of them fails in
`tests/on_tensorflow`: in `test_private.py`, or in what is trained there.
"""

from shardwright.tensorflow._private.graphs import *  # noqa: F403
from shardwright.tensorflow._private.keras import *  # noqa: F403
from shardwright.tensorflow._private.optimizers import *  # noqa: F403
from shardwright.tensorflow._private.variables import *  # noqa: F403
