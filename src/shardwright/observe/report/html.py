"""Escapes foreign text for HTML."""

import html

from shardwright.printable import printable

__all__ = ["escape"]


def escape(text: str) -> str:
    """Text that a page shows as it is: no tags, and no characters that turn what is around them.

    >>> escape("<b>\\u202e")
    '&lt;b&gt;\\\\u202e'
    """
    return html.escape(printable(text), quote=True)
