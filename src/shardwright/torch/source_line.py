"""Where in the user's code we are."""

import sys

__all__ = ["user_line"]


def user_line() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    fallback = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "shardwright.", "contextlib")) and module != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        fallback = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return fallback
