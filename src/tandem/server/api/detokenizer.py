"""Token ids to text as they come: what was streamed is, put together, what decoding all ids at once gives.

All ids are those of the prompt and of the answer: the text of an answer is what decoding both has more than decoding
the prompt. A decoder that drops the space before the first token must not drop the one between prompt and answer, and
a character that begins in the prompt ends in the answer.

A token may be part of a character, so text is held back until it can no longer change. Byte-level vocabularies have a
table of bytes per token and need nothing but an incremental UTF-8 decoder. All others are decoded in a short window
that begins a few tokens back, since their decoders look at the token before (leading spaces) or at runs (bytes).
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tandem.server.api.tokenizer import Tokenizer, byte_of

REPLACEMENT = "�"
MAX_CHAR_BYTES = 4
CONTEXT_TOKENS = 8  # of the prompt; one that shows as text is enough
MAX_RUN = 256  # bytes at the end of a prompt that are looked at
CONTINUATION = bytes(range(0x80, 0xC0))


class Detokenizer(Protocol):
    def add(self, id: int) -> str:
        """Text that is certain now, maybe none."""
        ...

    def finish(self) -> str:
        """The rest, after the last token."""
        ...


def detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> Detokenizer:
    """For the answer to `prompt`."""
    kind = ByteDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens, prompt)


def unfinished(data: bytes, *, errors: str) -> bytes:
    """The end of `data` that is the beginning of a character. With `strict` raises UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    decoder.decode(data)
    return decoder.getstate()[0]


def num_shared(shown: str, text: str) -> int:
    """How many characters of `text` are out already: all that were shown, but for U+FFFD that has become something."""
    if text.startswith(shown):
        return len(shown)
    return next((index for index, (old, new) in enumerate(zip(shown, text, strict=False)) if old != new), len(text))


class ByteDetokenizer:
    """For byte-level vocabularies: constant, small cost per token."""

    __slots__ = ("_decode", "_is_torn", "_skip", "_table")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> None:
        self._table = tokenizer.byte_table
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        tail = unfinished(self._end_of(prompt), errors="replace")
        self._is_torn = len(tail) > 0  # the prompt ends within a character, and has shown U+FFFD for it
        self._decode(tail)

    def add(self, id: int) -> str:
        if id in self._skip or id >= len(self._table):
            return ""
        return self._new(self._decode(self._table[id]))

    def finish(self) -> str:
        return self._new(self._decode(b"", True))

    def _new(self, text: str) -> str:
        if self._is_torn and text:
            self._is_torn = False
            return text.removeprefix(REPLACEMENT)
        return text

    def _end_of(self, prompt: Sequence[int]) -> bytes:
        end = b""
        for id in reversed(prompt):
            if id not in self._skip and id < len(self._table):
                end = self._table[id] + end
            if len(end) >= MAX_CHAR_BYTES:
                break
        return end


class WindowDetokenizer:
    """For every other decoder: the new text is what the window's text has more than it had before.

    The window is `[prefix, end)`, text of `[prefix, read)` is out already. It begins with a token that shows as text,
    so that a decoder which treats the first token in a special way does so before what is new.
    """

    __slots__ = ("_ids", "_read", "_shown", "_skip_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._ids = self._context(prompt)
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)  # text of ids[:read]

    def add(self, id: int) -> str:
        if not self._is_seen(id):
            return ""
        self._ids.append(id)
        name = self._tokenizer.token_name(id) or ""
        if byte_of(name) is not None:
            return ""  # one bad byte turns its whole run into U+FFFD, so a run is certain only at its end
        text = self._decode(self._ids)
        may_change = text.endswith(REPLACEMENT) and not name.endswith(REPLACEMENT)  # some vocabularies have it
        return "" if may_change else self._emit(text)

    def finish(self) -> str:
        return self._emit(self._decode(self._ids))

    def _emit(self, text: str) -> str:
        new = text[num_shared(self._shown, text) :]
        if new:
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._shown = self._decode(self._ids)
        return new

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The end of the prompt: a token or more that show as text, and of a run of bytes what still matters."""
        bytes_at_end: list[int] = []
        texts: list[int] = []
        for id in (id for id in reversed(prompt) if self._is_seen(id)):
            if byte_of(self._tokenizer.token_name(id)) is None:
                texts.insert(0, id)
                if len(texts) == CONTEXT_TOKENS or self._decode(texts):
                    break
            elif not texts:
                bytes_at_end.append(id)
                if len(bytes_at_end) == MAX_RUN:
                    break
        if bytes_at_end and not texts and self._tokenizer.plain_word is not None:
            texts = [self._tokenizer.plain_word]  # any word shows that what follows is no beginning
        return texts + self._open_end(bytes_at_end[::-1])

    def _open_end(self, run: list[int]) -> list[int]:
        """Of a run of bytes: none if it is whole, since a bad byte of the answer must not spoil what was shown; the
        beginning of a character, which may become one; all of a run that is no text and makes no other byte one.
        """
        data = b"".join(byte_of(self._tokenizer.token_name(id)) or b"" for id in run)
        if len(run) == MAX_RUN:
            data = data.lstrip(CONTINUATION)  # it was cut at any byte
        try:
            return run[len(run) - len(unfinished(data, errors="strict")) :]
        except UnicodeDecodeError:
            return run

    def _is_seen(self, id: int) -> bool:
        """By the decoder, which is given neither special tokens that are skipped nor ids that are no token."""
        is_skipped = self._skip_special and id in self._tokenizer.special_ids
        return not is_skipped and self._tokenizer.token_name(id) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
