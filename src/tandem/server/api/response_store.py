"""Responses that can be asked for again: `previous_response_id`, GET and DELETE of `/v1/responses/ID`.

They are kept by the program that the client talks to: a unified server, or the router in front of pairs, so that what
a conversation is does not depend on which pair serves it (decision 018). Kept in memory, within two bounds, and gone
with the program. Each is found under the API key it was made with and under no other.

A response holds what was said in its own turn and refers to the turn before, so a long conversation is kept once. A
turn lives as long as a response refers to it: deleting one leaves those that followed it whole. When there are too many
responses or bytes, the tenant that keeps the most gives up its oldest ones.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple  # items are JSON

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.server.api.body import unsupported
from tandem.server.api.bounds import LOOP_BYTES, MAX_BODY_BYTES
from tandem.server.api.errors import Problem, Refusal, invalid
from tandem.server.api.large_body import check_counts
from tandem.server.api.off_loop import off_loop
from tandem.server.api.responses import items_of
from tandem.server.api.tenant import given_key, tenant_of

PAGE_ITEMS, MAX_PAGE_ITEMS = 20, 100
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}

encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class Turn:
    """What one request said and was answered."""

    given: bytes  # JSON lists of items, each with an id
    output: bytes
    before: "Turn | None"
    num_referrers: int = 0  # responses, and turns after it

    @property
    def size(self) -> int:
        return len(self.given) + len(self.output)


@dataclass(slots=True, eq=False)
class Kept:
    owner: str
    document: bytes
    turn: Turn
    items: dict[str, Raw]  # of the turn's output, by id


class Begun(NamedTuple):
    """What a request goes on from."""

    before: bytes  # JSON: all items before its own
    given: Any  # its `input`, with the items of kept responses that it names
    size: int  # bytes of both that its body has not


class PendingResponse:
    """One request on its way: whose it is, what it says, and what it goes on from."""

    def __init__(self, store: "ResponseStore", owner: str) -> None:
        self._store = store
        self._owner = owner
        self._given = b"[]"
        self._before: Turn | None = None
        self.has_begun = False

    def begin(self, previous: str | None, given: Any, items: object) -> Begun:
        """In any thread. given: `input` of the body.

        items: `kept_items` of the body, which only this server may fill in. Raises `Refusal`, for a response or an item
        that is not there above all. An `input` that is none is refused by who reads it.
        """
        if items is not None:
            raise unsupported("kept_items", " from clients: name a response by previous_response_id, or use input")
        if previous is not None:
            self._before = self._store.find(self._owner, previous, is_previous=True).turn
        fetched = 0
        if isinstance(given, list) and all(isinstance(item, dict) for item in given):
            given, fetched = self._fetched(given)
            self._given = encode([with_id(item) for item in given])
        elif isinstance(given, str) and given:
            self._given = encode([with_id(item) for item in items_of(given)])
        check_size(len(self._given) + size_until(self._before))
        kept = items_until(self._before)
        check_counts(kept)
        self.has_begun = True
        return Begun(kept, given, len(kept) + fetched)

    def _fetched(self, given: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
        """With the items of kept responses where there are references to them, and how many bytes those have."""
        ids = [item["id"] for item in given if is_reference(item)]
        raws = self._store.items(self._owner, ids)
        size = sum(len(raws[id]) for id in ids)
        check_size(size)  # one item may be named again and again
        check_counts(joined(b"[%b]" % bytes(raw) for raw in raws.values()))
        items = {id: msgspec.json.decode(raw) for id, raw in raws.items()}
        return [items[item["id"]] if is_reference(item) else item for item in given], size

    def keep(self, document: bytes) -> None:
        """In any thread. The answer, unless it has failed or is not to be kept. Raises msgspec's errors for one that is
        none."""
        answer = msgspec.json.decode(document, type=ResponseBody)
        if not answer.store or answer.status not in ("completed", "incomplete"):
            return
        # Or it is no list that can be shown or gone on from.
        ids = [item.id for item in msgspec.json.decode(answer.output, type=list[Item])]
        output = bytes(answer.output)
        items = dict(zip(ids, msgspec.json.decode(output, type=list[Raw]), strict=True))
        self._store.put(answer.id, Kept(self._owner, document, Turn(self._given, output, self._before), items))


class Item(Struct, frozen=True):
    """Of an output. What else it has is not looked at here."""

    id: str


class ResponseBody(Struct, frozen=True):
    """What of a response's document matters here."""

    id: str
    output: Raw  # a list of `Item`
    status: str
    store: bool


@dataclass(slots=True)
class ResponseStore:
    """In any thread. `max_responses` 0: it keeps nothing."""

    max_responses: int
    max_bytes: int
    num_bytes: int = 0
    _kept: dict[str, dict[str, Kept]] = field(default_factory=dict[str, dict[str, Kept]])  # by owner and id, in order
    _lock: Lock = field(default_factory=Lock)

    @property
    def keeps(self) -> bool:
        return self.max_responses > 0

    def put(self, id: str, kept: Kept) -> None:
        with self._lock:
            self._drop(kept.owner, id)
            self._kept.setdefault(kept.owner, {})[id] = kept
            self.num_bytes += len(kept.document)
            self._hold(kept.turn)
            while self.num_bytes > self.max_bytes or sum(map(len, self._kept.values())) > self.max_responses:
                self._drop_oldest()

    def find(self, owner: str, id: str, *, is_previous: bool = False) -> Kept:
        """Raises `Refusal` for a response that is not there.

        is_previous: a body named it, and is what is wrong, as OpenAI has it; else a path did.
        """
        with self._lock:
            kept = self._kept.get(owner, {}).get(id)
        if kept is None:
            code = Problem.PREVIOUS_RESPONSE_NOT_FOUND if is_previous else Problem.RESPONSE_NOT_FOUND
            param = "previous_response_id" if is_previous else None
            raise Refusal(code, f"there is no response {id[:80]!r}", param=param)
        return kept

    def items(self, owner: str, ids: Sequence[str]) -> dict[str, Raw]:
        """Of the outputs of kept responses, by id. Raises `Refusal` for one that is not there."""
        if not ids:
            return {}
        wanted = set(ids)
        with self._lock:
            responses = self._kept.get(owner, {}).values()
            found = {id: kept.items[id] for kept in responses for id in kept.items.keys() & wanted}
        for id in ids:
            if id not in found:
                raise Refusal(Problem.RESPONSE_NOT_FOUND, f"input: there is no item {id[:80]!r}", param="input")
        return found

    def delete(self, owner: str, id: str) -> None:
        """Raises `Refusal`, as `find`."""
        self.find(owner, id)
        with self._lock:
            self._drop(owner, id)

    def _drop_oldest(self) -> None:
        """Of the tenant with the most bytes where bytes are too many, else of the one with the most responses."""
        amount = self._bytes_of if self.num_bytes > self.max_bytes else self._responses_of
        owner = max(self._kept, key=amount)
        self._drop(owner, next(iter(self._kept[owner])))

    def _responses_of(self, owner: str) -> int:
        return len(self._kept[owner])

    def _bytes_of(self, owner: str) -> int:
        """Of its responses, and of their own turns, of which another one may be a part."""
        return sum(len(kept.document) + kept.turn.size for kept in self._kept[owner].values())

    def _drop(self, owner: str, id: str) -> None:
        responses = self._kept.get(owner, {})
        kept = responses.pop(id, None)
        if kept is None:
            return
        if not responses:
            del self._kept[owner]
        self.num_bytes -= len(kept.document)
        self._release(kept.turn)

    def _hold(self, turn: Turn | None) -> None:
        """Another one refers to it. Turns before it are counted while it is."""
        while turn is not None:
            turn.num_referrers += 1
            if turn.num_referrers > 1:
                return
            self.num_bytes += turn.size
            turn = turn.before

    def _release(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.num_referrers -= 1
            if turn.num_referrers > 0:
                return
            self.num_bytes -= turn.size
            turn = turn.before


def is_reference(item: dict[str, Any]) -> bool:
    """To an item that clients do not send again, as it is kept with a response."""
    return item.get("type") == "item_reference" and isinstance(item.get("id"), str)


def check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise Refusal(Problem.BODY_TOO_LARGE, f"the conversation has {size} bytes, more than {MAX_BODY_BYTES}")


def size_until(turn: Turn | None) -> int:
    """Bytes of all turns up to and with this one."""
    size = 0
    while turn is not None:
        size, turn = size + turn.size, turn.before
    return size


def items_until(turn: Turn | None) -> bytes:
    """JSON: all items of a conversation up to and with this turn."""
    turns: list[Turn] = []
    while turn is not None:
        turns.append(turn)
        turn = turn.before
    return joined(part for turn in reversed(turns) for part in (turn.given, turn.output))


def joined(lists: Iterable[bytes]) -> bytes:
    """One JSON list of several ones."""
    return b"[" + b",".join(part for one in lists if (part := one.strip()[1:-1].strip())) + b"]"


def with_id(item: dict[str, Any]) -> dict[str, Any]:
    """As it is listed: with an id, a type, and parts instead of a bare text."""
    kind = item.get("type", "message")
    made = {"type": kind, **item}
    if not isinstance(item.get("id"), str):
        made["id"] = f"{ID_PREFIXES.get(str(kind), 'item')}_{secrets.token_hex(24)}"
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        made["content"] = [{"type": part, "text": item["content"]}]
    return made


def owner_of(request: Request) -> str:
    return tenant_of(given_key(request.headers), None)


class ResponsePages:
    """What the clients' libraries ask of a response by its id."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses/{id}", self.read, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
        ]

    async def read(self, request: Request) -> Response:
        refuse_queries(request, "stream", "starting_after", "include")
        kept = self._store.find(owner_of(request), request.path_params["id"])
        return Response(kept.document, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._store.delete(owner_of(request), id)
        return Response(encode({"id": id, "object": "response", "deleted": True}), media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        query = request.query_params
        refuse_queries(request, "include")
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise invalid("order", "must be asc or desc")
        turn = self._store.find(owner_of(request), request.path_params["id"]).turn
        size = size_until(turn)
        limit, after = limit_of(query.get("limit")), query.get("after")
        page = await off_loop(size, LOOP_BYTES, page_of, turn, is_reversed=order == "desc", limit=limit, after=after)
        return Response(page, media_type="application/json")


def refuse_queries(request: Request, *names: str) -> None:
    for name in names:
        given = [value for key, value in request.query_params.multi_items() if key in (name, f"{name}[]")]
        if any(value not in ("", "false") for value in given):
            raise unsupported(name)


def page_of(turn: Turn, *, is_reversed: bool, limit: int, after: str | None) -> bytes:
    """A part of what a turn was given and all that came before it, as the clients' libraries turn its pages."""
    items: list[dict[str, Any]] = msgspec.json.decode(joined((items_until(turn.before), turn.given)))
    if is_reversed:
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid("after", "is the id of none of these items")
        items = items[places[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = len(page) < len(items)
    return encode({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more})


def limit_of(given: str | None) -> int:
    limit = PAGE_ITEMS if given is None else int(given) if given.isdecimal() and len(given) < 5 else 0
    if not 1 <= limit <= MAX_PAGE_ITEMS:
        raise invalid("limit", f"must be 1 to {MAX_PAGE_ITEMS}")
    return limit
