"""These tests need TensorFlow, in an environment of its own: make test-tensorflow."""

import importlib.util
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# This list counts here in place of that of the folder above. Scripts run where tests start them.
collect_ignore_glob = ["scripts/*"]
if importlib.util.find_spec("tensorflow") is None:
    collect_ignore_glob.append("test_*.py")
