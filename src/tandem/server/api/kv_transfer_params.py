"""The pair as vLLM's routers speak of it: first prefill, then decode with what prefill has answered.

    to prefill   {..., "max_tokens": 1, "stream": false, "kv_transfer_params": {"do_remote_decode": true, ...}}
    its answer   {..., "kv_transfer_params": {"do_remote_prefill": true, "remote_host": ..., "remote_port": ..., ...}}
    to decode    {..., "kv_transfer_params": what prefill answered}

Here a pair meets in a room (`docs/protocol.md`), so prefill draws one, answers at once, and computes the prompt while
the router goes on to decode: two requests of such a router are the two halves of any other. The room and the address of
the bootstrap server are all that decode needs; the names of the rest are vLLM's, for routers that look at them.

What a router says instead of the client (`max_tokens` and `min_tokens` of 1) is not taken for the client's word. But
the first token depends on `min_tokens`: it may be no end then. So prefill's answer says which it assumes, and decode,
which knows the client's, ends that half where they differ and computes the prompt itself. It ends it, too, where it
refuses what prefill could not see.
"""

import secrets
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from tandem.server.api.body import ChatBody, CompletionBody, Routing, decode_body
from tandem.server.api.bounds import MAX_ROOM, Int
from tandem.server.api.errors import contradiction, invalid
from tandem.server.api.limits import ModelLimits
from tandem.server.api.sample_requests import SampleRequest, check_port, check_room

FIELD = "kv_transfer_params"
NAME = f'"{FIELD}"'.encode()
ROUTERS_TOKENS = 1  # that it asks prefill for
ROUTERS_FIELDS = ("max_tokens", "max_completion_tokens", "stream", "stream_options")

encode = msgspec.json.Encoder().encode


class KvTransferParams(Struct):
    """Other members are somebody else's."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_host: str | None = None
    remote_port: Int | None = None
    remote_room: Int | str | None = None
    remote_min_tokens: Int | None = None  # as prefill has it


class _Transferring(Struct):
    kv_transfer_params: KvTransferParams | None = None


def read_params(raw: bytes, limits: ModelLimits) -> KvTransferParams | None:
    """Of a body; None where nothing is asked for, or nobody has another half. Raises `Refusal`."""
    is_read = limits.role != "unified" and NAME in raw
    return decode_body(raw, _Transferring).kv_transfer_params if is_read else None


def is_handed_over(params: KvTransferParams | None, body: Struct, routing: Routing, limits: ModelLimits) -> bool:
    """Of a prefill: whether the answer is what decode needs. Then the body is what it is for the half of a pair."""
    is_asked_for = params is not None and params.do_remote_decode and routing.bootstrap_room is None
    if limits.role != "prefill" or not is_asked_for or not isinstance(body, ChatBody | CompletionBody):
        return False
    if routing.stream:
        raise contradiction("stream", f"the answer to {FIELD} with do_remote_decode is whole")
    routing.bootstrap_room = 1 + secrets.randbelow(MAX_ROOM)
    body.max_tokens = body.stream_options = None  # the second of a stream that decode gives
    if isinstance(body, ChatBody):
        body.max_completion_tokens = None
    if body.min_tokens == ROUTERS_TOKENS:
        body.min_tokens = None
    return True


def follow(params: KvTransferParams | None, body: Struct, routing: Routing, limits: ModelLimits) -> bool:
    """Of a decode: say in the fields of a pair where prefill has answered from. Raises `Refusal`.

    False: its first token may be another one than here, so this request is no half of that pair.
    """
    if limits.role != "decode" or routing.bootstrap_room is not None:
        return True
    if params is None or not params.do_remote_prefill or not isinstance(body, ChatBody | CompletionBody):
        return True
    if params.remote_room is None or params.remote_host is None:
        raise invalid(FIELD, "remote_host and remote_room have to be those that a prefill server here has answered")
    if (body.min_tokens or 0) != (params.remote_min_tokens or 0):
        if limits.is_strict_remote:
            raise contradiction("min_tokens", "is not what prefill was told, and this decode computes no prompt itself")
        return False
    port = params.remote_port
    routing.bootstrap_room = check_room(params.remote_room, f"{FIELD}.remote_room")
    routing.bootstrap_host = params.remote_host
    routing.bootstrap_port = None if port is None else check_port(port, f"{FIELD}.remote_port")
    return True


def as_prefill_was_asked(raw: bytes, params: KvTransferParams) -> bytes:
    """The body, but for what a router says instead of the client."""
    body = msgspec.json.decode(raw)
    body.update(dict.fromkeys(ROUTERS_FIELDS), min_tokens=params.remote_min_tokens or 0)
    return encode(body)


def prefill_answer(
    routing: Routing, asks: Sequence[SampleRequest], host: str, limits: ModelLimits, *, model: str, is_chat: bool
) -> bytes:
    """What says where the KV will be. host: where the router has reached this server, and decode may."""
    text: dict[str, object] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"text": ""}
    count = sum({ask.prompt_index: len(ask.prompt.tokens) for ask in asks}.values())
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": str(routing.bootstrap_room),
        "remote_block_ids": [],
        "remote_host": host,
        "remote_port": limits.bootstrap_port,
        "remote_room": str(routing.bootstrap_room),
        "remote_min_tokens": asks[0].sampling.min_tokens,
    }
    return encode(
        {
            "id": asks[0].rid,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": ask.index, **text, "logprobs": None, "finish_reason": "length"} for ask in asks],
            "usage": {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count},
            FIELD: params,
        }
    )
