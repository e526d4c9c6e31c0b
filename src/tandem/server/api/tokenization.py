"""What the model's tokenizer makes of a text, and back. Nothing reaches the node."""

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.server.api.body import DETOKENIZE_PATHS, TOKENIZE_PATHS, DetokenizeBody, TokenizeBody
from tandem.server.api.bounds import LOOP_CHAT_BYTES, LOOP_IDS, MAX_DETOKENIZED, MAX_PROMPTS, MAX_TEXT_CHARS
from tandem.server.api.endpoint_parts import read_body
from tandem.server.api.errors import invalid
from tandem.server.api.large_body import decode_anywhere
from tandem.server.api.off_loop import off_loop
from tandem.server.api.openai import chat_text
from tandem.server.api.ops import json_response
from tandem.server.api.served_model import ServedModel
from tandem.server.api.validation import check_ids


class TokenizationPage:
    """One instance per application; the methods are its endpoints."""

    def __init__(self, served: ServedModel) -> None:
        self._tokenizer = served.tokenizer
        self._limits = served.limits
        self._form = served.form

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self.tokenize, methods=["POST"]) for path in TOKENIZE_PATHS),
            *(Route(path, self.detokenize, methods=["POST"]) for path in DETOKENIZE_PATHS),
        ]

    async def tokenize(self, request: Request) -> Response:
        raw = await read_body(request)
        body = await decode_anywhere(raw, TokenizeBody)
        is_chat = body.messages is not None
        param = "messages" if is_chat else "prompt" if body.prompt is not None else "text"
        value: str | list[str] | None = body.text if body.prompt is None else body.prompt
        if is_chat:
            value = await off_loop(len(raw), LOOP_CHAT_BYTES, self._chat_text, body)
        if value is None:
            raise invalid("prompt", "is missing")
        texts = [value] if isinstance(value, str) else value
        check_sizes(texts, MAX_TEXT_CHARS, param, "characters")
        adds = body.add_special_tokens is not False and not is_chat  # a template writes them itself
        rows = [await self._tokenizer.encode_anywhere(text, add_special_tokens=adds) for text in texts]
        names = bool(body.return_token_strs)
        return await off_loop(sum(map(len, rows)), LOOP_IDS, self._told, rows, isinstance(value, str), names)

    def _told(self, rows: list[list[int]], is_single: bool, names: bool) -> Response:
        """In any thread. names: the tokens are also told as the vocabulary spells them."""
        spelled = {"token_strs": list(map(self._tokenizer.token_names, rows))} if names else {}
        columns = {"tokens": rows, "count": list(map(len, rows)), **spelled}
        told = {name: column[0] for name, column in columns.items()} if is_single else columns
        return json_response({**told, "max_model_len": self._limits.context_length})

    def _chat_text(self, body: TokenizeBody) -> str:
        chat = body.chat
        rendered_at = int(time.time()) if body.rendered_at is None else body.rendered_at
        return chat_text(chat, self._tokenizer, rendered_at, self._form.answer_to(chat).offered).text

    async def detokenize(self, request: Request) -> Response:
        raw = await read_body(request)
        body = await decode_anywhere(raw, DetokenizeBody)
        return await off_loop(len(raw), LOOP_IDS, self._text_of, body)  # an id takes two bytes at least

    def _text_of(self, body: DetokenizeBody) -> Response:
        """In any thread."""
        if body.tokens is None:
            raise invalid("tokens", "is missing")
        lists = [item for item in body.tokens if isinstance(item, list)]
        ids = [item for item in body.tokens if isinstance(item, int)]
        if lists and ids:
            raise invalid("tokens", "mixes ids and lists")
        rows = lists or [ids]
        check_sizes(rows, MAX_DETOKENIZED, "tokens", "ids")
        for row in rows:
            check_ids(row, self._limits, "tokens")
        skips = body.skip_special_tokens is not False
        texts = [self._tokenizer.decode(row, skip_special_tokens=skips) for row in rows]
        text = texts if lists else texts[0]
        return json_response({"text": text, "prompt": text})


def check_sizes(items: Sequence[str] | Sequence[list[int]], most: int, param: str, unit: str) -> None:
    """Raises `Refusal` for more items than one request may hold, or longer ones than `most` together."""
    if len(items) > MAX_PROMPTS:
        raise invalid(param, f"{len(items)} items in one request; at most {MAX_PROMPTS} are accepted")
    size = sum(map(len, items))
    if size > most:
        raise invalid(param, f"{size} {unit} in one request; at most {most} are accepted")
