"""Files that users name: read with care, and written whole."""

from shardwright.files.documents import (
    DocumentError,
    check_document,
    format_yaml,
    no_name_twice,
    parse_json,
    parse_yaml,
)
from shardwright.files.user_file import (
    Record,
    UserFile,
    check_place,
    is_left_by_another,
    open_to_append,
    replace_file,
)

__all__ = [
    "DocumentError",
    "Record",
    "UserFile",
    "check_document",
    "check_place",
    "format_yaml",
    "is_left_by_another",
    "no_name_twice",
    "open_to_append",
    "parse_json",
    "parse_yaml",
    "replace_file",
]
