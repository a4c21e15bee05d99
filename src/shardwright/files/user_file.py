"""Reads a file that a user names, and writes one: its kind, length and content are unknown.

It reports at once a pipe without a writer, an endless device, a folder, and a file of other text than
expected. Each reader names what it wants to read, and its error class::

    document = UserFile(path, what="plan file", error=PlanError).read_json()

A rename replaces anything: a write to ``/dev/full`` by root turned a device of the whole machine into a file.
So it first checks what is at the path, through links.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, BinaryIO, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from shardwright.errors import ConfigError, ShardwrightError
from shardwright.files.documents import DocumentError, parse_json, parse_yaml
from shardwright.problems import describe, field_names, join, no_bool
from shardwright.quantities import MOST_BYTES, parse_bytes
from shardwright.text import control_in, printable

_Model = TypeVar("_Model", bound=BaseModel)

_MOST_BYTES = 64 * 2**20
_MOST_YAML_BYTES = 2**20  # settings and machines; a megabyte of it takes seconds to read
_MOST_LINE_BYTES = 16 * 2**20
_CHUNK = 2**20

KIND_OF_FILE = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
"""What a path may lead to that is no regular file."""


@dataclass(frozen=True, slots=True)
class UserFile:
    """A file that is to be read.

    Attributes:
        what: it is for the user, such as ``plan file``; messages begin with it.
        advice: what to do where it cannot be used, without a full stop; may be empty.
        most_bytes: that are read; a longer file is refused.
    """

    path: str | os.PathLike[str]
    what: str
    error: type[ShardwrightError]
    advice: str = ""
    most_bytes: int = _MOST_BYTES

    def __str__(self) -> str:
        """The kind of the file, and its path as a console shows it."""
        return f"{self.what} {printable(os.fspath(self.path))}".strip()

    def _inside(self) -> str:
        """The plan in a run folder that is named in its place."""
        plan = Path(self.path) / "plan.json"
        return f". The plan in it: {printable(str(plan))}" if plan.is_file() else ""

    def refused(self, problem: str) -> ShardwrightError:
        """The error to raise; the problem goes on from the name of the file."""
        return self.error(f"{self} {problem}.{self.advice and f' {self.advice}.'}")

    def read_bytes(self) -> bytes:
        return self._limited(self.most_bytes)

    def read_text(self) -> str:
        return self._decoded(self.read_bytes())

    def read_json(self, *, free_text: bool = False) -> Any:
        content = self.read_bytes()
        try:
            return parse_json(content, free_text=free_text)
        except DocumentError as error:
            raise self.refused(error.predicate) from None

    def read_yaml(self) -> Any:
        content = self._limited(min(self.most_bytes, _MOST_YAML_BYTES))
        try:
            # JSON is YAML, but not all of it: some of its YAML does not read where there are tabs.
            return parse_json(content) if Path(self.path).suffix == ".json" else parse_yaml(content)
        except DocumentError as error:
            raise self.refused(error.predicate) from None

    def model(self, model: type[_Model], document: Any) -> _Model:
        try:
            return model.model_validate(document)
        except ValidationError as error:
            problems = describe(error.errors(), root="the file", known=field_names(model))
            raise self.wrong_fields(problems) from None

    def wrong_fields(self, problems: list[str]) -> ShardwrightError:
        return self.error(join(f"{self} cannot be used{self.advice and f' ({self.advice})'}:", problems))

    def read_lines(self) -> Iterator[bytes]:
        rest = b""
        for chunk in self._chunks(self.most_bytes):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
            if len(rest) > _MOST_LINE_BYTES:
                raise self.refused(f"has a line of more than {_MOST_LINE_BYTES} bytes, so it is none")
        if rest:
            yield rest

    def _limited(self, most_bytes: int) -> bytes:
        return b"".join(self._chunks(most_bytes))

    def _chunks(self, most_bytes: int) -> Iterator[bytes]:
        """Its content, bit by bit: what a file says of its length is not believed, for ``/proc`` says 0."""
        left = most_bytes
        try:
            descriptor = self._open()
            try:
                if os.fstat(descriptor).st_size > most_bytes:
                    left = -1
                while left >= 0 and (chunk := os.read(descriptor, min(_CHUNK, left + 1))):
                    left -= len(chunk)
                    if left >= 0:
                        yield chunk
            finally:
                os.close(descriptor)
            if left < 0:
                raise self.refused(f"has more than {most_bytes} bytes, so it is none")
        except ShardwrightError:
            raise
        except OSError as error:
            raise self.refused(f"cannot be read: {error.strerror}{self._inside()}") from error
        except ValueError as error:  # of a path with a NUL in it
            raise self.refused(f"cannot be read: {error}") from error

    def _open(self) -> int:
        # Before it is opened, for that alone does things to some devices; NONBLOCK: and waits for a pipe.
        self._refuse_others(os.stat(self.path))
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            self._refuse_others(os.fstat(descriptor))  # another one may be there by now
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _refuse_others(self, status: os.stat_result) -> None:
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if kind != stat.S_IFREG:
            named = KIND_OF_FILE.get(kind, "something else")
            raise self.refused(f"cannot be read: it is {named}, and no file")

    def _decoded(self, content: bytes) -> str:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            where = f"byte {error.start} is {content[error.start]:#04x}"
            raise self.refused(f"is no UTF-8 text: {where}") from None


class Record(BaseModel):
    """Frozen; fields that are not known are errors, and true is not 1."""

    # Validators are made with the first object of a class: most processes use few of the classes.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    left_out: ClassVar[tuple[str, ...]] = ()
    """Fields that files leave out at their defaults: versions that do not know them read such files."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = serialize(self)
        for name in self.left_out:
            if getattr(self, name) == type(self).model_fields[name].get_default(call_default_factory=True):
                found.pop(name, None)
        return found

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        is_number = _is_number(cls.model_fields[str(info.field_name)].annotation)
        return no_bool(value) if is_number else value


def _is_number(annotation: Any) -> bool:
    kinds = set(_kinds(annotation))
    return not kinds.isdisjoint((int, float)) and bool not in kinds


def _kinds(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for inside in get_args(annotation):
            yield from _kinds(inside)
    else:
        yield annotation


NUMBER = BeforeValidator(no_bool)  # in dataclasses: a `Record` looks at all its fields
Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False), NUMBER]
NonNegative = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False), NUMBER]
Seconds = Annotated[float, Field(ge=0, le=1e6), NUMBER]  # more are a mistake, as of one unit or message
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES), NUMBER]
Share = Annotated[float, Field(ge=0, le=1), NUMBER]


def _bytes(value: Any) -> Any:
    try:
        return parse_bytes(no_bool(value))
    except ConfigError:
        raise ValueError("it must be a size such as 40GiB, or a number of bytes") from None


NumBytes = Annotated[int, BeforeValidator(_bytes)]
"""A number of bytes, or a text such as 40GiB."""


_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def replace_file(path: str | os.PathLike[str], content: str | bytes, *, follows: bool = True) -> None:
    """Writes a file: readers find the old content or the new one, never a part.

    A link is followed: the file that it leads to is replaced, and the link stays. One that another user has
    left in a folder for all, such as /tmp, is not, whatever the kernel allows.

    Args:
        follows: False for a name that nobody has given: there, a link is replaced.
    """
    target = check_place(path) if follows or not os.path.islink(path) else Path(path)
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
