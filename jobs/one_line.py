"""Text of a run on one line of a terminal. Knows nothing of what the text is.

Ids and reasons may hold anything: a line end would look like another row of a listing, and an
escape sequence would be obeyed by the terminal.
"""

from __future__ import annotations


def one_line(text: str) -> str:
    r"""Return the text with all that does not print as its escape, such as ``\n`` or ``\x1b``."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
