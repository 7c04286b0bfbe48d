"""Text that is not ours, made fit for a terminal: what would command the terminal or turn the reading order is spelled out. Pure.

Ids are the clients', messages and names the models'. Nothing is spelled out twice: what has been made visible stays as it is.
"""

from __future__ import annotations

from typing import Final

_C0, _DEL_AND_C1 = range(0x20), range(0x7F, 0xA0)
#: What orders text from right to left and back; U+2028 and U+2029 end lines; lone surrogates cannot be written at all.
_BIDI: Final = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_COMMANDS: Final = (*_C0, *_DEL_AND_C1, *_BIDI, 0x2028, 0x2029, *range(0xD800, 0xE000))
_ESCAPES: Final = {code: chr(code).encode("unicode_escape").decode() for code in _COMMANDS}
_ESCAPES_OF_LINES: Final = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    r"""Spell out control characters as Python does (\x1b, \n, \u202e): the result is one line."""
    return text.translate(_ESCAPES)


def visible_lines(text: str) -> str:
    """Do the same to a text of several lines: its newlines and tabs stay."""
    return text.translate(_ESCAPES_OF_LINES)
