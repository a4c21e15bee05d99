"""The secret of a run, by which its ranks authenticate their messages.

The launcher of the ranks makes it, and passes it in one of two variables::

    SHARDWRIGHT_SECRET         the secret itself: environments are readable for their user alone
    SHARDWRIGHT_SECRET_FILE    a file that has it, and that nobody else can read (mode 0600)

It appears in no log, run folder or command line, because other users can read those.
"""

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from shardwright.comm.trust.seal import Seal
from shardwright.errors import LaunchError

__all__ = ["SECRET", "SECRET_FILE", "has_secret", "new_secret", "seal_of_run"]

SECRET = "SHARDWRIGHT_SECRET"
SECRET_FILE = "SHARDWRIGHT_SECRET_FILE"

_LEAST_CHARACTERS = 32
_MOST_BYTES = 4096


def new_secret() -> str:
    """A secret that nobody can guess."""
    return secrets.token_hex(32)


def has_secret(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has handed on a secret."""
    return bool(environ.get(SECRET) or environ.get(SECRET_FILE))


def seal_of_run(environ: Mapping[str, str]) -> Seal | None:
    """The seal under the secret that a launcher has handed on; None where it has handed on none."""
    if not has_secret(environ):
        return None
    text, source = environ.get(SECRET, ""), SECRET
    if not text:
        path = Path(environ[SECRET_FILE])
        text, source = _read(path), f"the file {path} of {SECRET_FILE}"
    text = text.strip()
    if len(text) < _LEAST_CHARACTERS:
        raise LaunchError(
            f"{source} has {len(text)} characters, which can be guessed; a secret has {_LEAST_CHARACTERS} at "
            "least. Make one: openssl rand -hex 32"
        )
    return Seal(text.encode(errors="surrogateescape"))


def _read(path: Path) -> str:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(opened)
            if not stat.S_ISREG(state.st_mode):
                raise LaunchError(f"{path} of {SECRET_FILE} is no regular file. Name one of mode 0600.")
            if state.st_mode & 0o077 or state.st_uid not in (os.geteuid(), 0):
                raise LaunchError(
                    f"{path} of {SECRET_FILE} has mode {state.st_mode & 0o777:04o} and belongs to user "
                    f"{state.st_uid}: others can read or replace it. Make it your own: chmod 600 {path}"
                )
            return os.read(opened, _MOST_BYTES).decode(errors="surrogateescape")
        finally:
            os.close(opened)
    except OSError as error:
        raise LaunchError(
            f"{path} of {SECRET_FILE} cannot be read: {error.strerror}. It must be on every host, with the "
            "same secret."
        ) from error
