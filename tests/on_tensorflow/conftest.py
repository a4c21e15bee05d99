"""These tests need TensorFlow, in an environment of its own: make test-tensorflow."""

import importlib.util
import os

from shardwright.testing import preload

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# This list counts here in place of that of the folder above. Scripts run where tests start them.
collect_ignore_glob = ["scripts/*"]
if importlib.util.find_spec("tensorflow") is None:
    collect_ignore_glob.append("test_*.py")
else:
    # Importing them takes a rank 4 s, longer than most of what it does then. Which Keras `tf.keras` is,
    # TensorFlow finds out when a rank first asks for it: after its TF_USE_LEGACY_KERAS was set.
    preload("tensorflow", "tf_keras")
    # Keras imports pandas, and with it pyarrow, whose allocator starts a thread: the server could not fork.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
