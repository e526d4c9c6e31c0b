"""Token ids to text as they come: what was streamed is, put together, what decoding all ids at once gives.

A token may be part of a character, so text is held back until it can no longer change. Byte-level vocabularies have a
table of bytes per token and need nothing but an incremental UTF-8 decoder. All others are decoded in a short window
that begins a few tokens back, since their decoders look at the token before (leading spaces) or at runs (bytes).
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tandem.server.api.tokenizer import Tokenizer

REPLACEMENT = "�"


class Detokenizer(Protocol):
    def add(self, id: int) -> str:
        """Text that is certain now, maybe none."""
        ...

    def finish(self) -> str:
        """The rest, after the last token."""
        ...


def detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Detokenizer:
    kind = ByteDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens)


class ByteDetokenizer:
    """For byte-level vocabularies: constant, small cost per token."""

    __slots__ = ("_decode", "_skip", "_table")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._table = tokenizer.byte_table
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, id: int) -> str:
        if id in self._skip or id >= len(self._table):
            return ""
        return self._decode(self._table[id])

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other decoder: the new text is what the window's text has more than it had before.

    The window is `[prefix, end)`, text of `[prefix, read)` is out already. It begins with a token that shows as text,
    so that a decoder which treats the first token in a special way does so before what is new.
    """

    __slots__ = ("_ids", "_read", "_shown", "_skip_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []
        self._read = 0
        self._shown = ""  # text of ids[:read]

    def add(self, id: int) -> str:
        if self._skip_special and id in self._tokenizer.special_ids:
            return ""  # decoders never see it
        self._ids.append(id)
        if is_byte_token(self._tokenizer.token_name(id)):
            return ""  # one bad byte turns its whole run into U+FFFD, so a run is certain only at its end
        text = self._decode(self._ids)
        return "" if text.endswith(REPLACEMENT) else self._emit(text)

    def finish(self) -> str:
        return self._emit(self._decode(self._ids))

    def _emit(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


def is_byte_token(name: str | None) -> bool:
    return name is not None and len(name) == 6 and name.startswith("<0x") and name.endswith(">")
