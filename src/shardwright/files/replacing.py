"""Writes files that a user names, whole or not at all; replaces files and nothing else.

A rename replaces anything: a write to ``/dev/full`` by root turned a device of the whole machine into a file.
So it first checks what is at the path, through links.
"""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from shardwright.files.user_file import KIND_OF_FILE
from shardwright.text import control_in

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def replace_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file: readers find the old content or the new one, never a part.

    A link is followed: the file that it leads to is replaced, and the link stays. One that another user has
    left in a folder for all, such as /tmp, is not, whatever the kernel allows.
    """
    target = check_place(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    # A name that nobody can foresee, for a new file only: in a folder for all, a link could wait at another.
    temporary = target.with_name(f".{target.name[:100]}.tmp-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, _NEW_FILE, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(descriptor, target.stat().st_mode & 0o777)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def check_place(path: str | os.PathLike[str]) -> Path:
    """Checks the place of a file before its content is worked out."""
    if (control := control_in(Path(path).name)) is not None:
        raise OSError(errno.EINVAL, f"its name has a control character, {control}")
    target = _behind_links(Path(path))
    with contextlib.suppress(FileNotFoundError):
        _refuse_others(os.lstat(target))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {target.parent}")
    return target


def is_left_by_another(path: str | os.PathLike[str]) -> bool:
    """Whether something is another user's, in a folder where everybody can put things, such as /tmp."""
    there, around = os.lstat(path), os.stat(Path(path).parent)
    is_for_all = bool(around.st_mode & stat.S_ISVTX and around.st_mode & stat.S_IWOTH)
    return is_for_all and there.st_uid not in (os.geteuid(), around.st_uid)


def _behind_links(path: Path) -> Path:
    """Follows a path link by link, so that nobody can put another link in between after a check."""
    place = Path(os.path.realpath(path.parent), path.name)
    if not place.is_symlink():
        return place
    if is_left_by_another(place):
        raise PermissionError(errno.EACCES, "it is a link that another user has left in a folder for all")
    with contextlib.suppress(FileNotFoundError):
        os.stat(place)  # refuses links that lead in a circle
    return _behind_links(place.parent / os.readlink(place))


def open_to_append(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file at its end, and makes it where there is none; a pipe is refused, not waited for."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(check_place(path), flags, 0o666)
    try:
        _refuse_others(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "a+b")


def _refuse_others(status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        named = KIND_OF_FILE.get(kind, "something else")
        raise OSError(errno.EINVAL, f"it is {named}, and only a file is replaced")
