"""`/openapi.json`: the bodies that are really decoded (`openapi_bodies.py`), nothing that is not.

A body that fits its schema is refused only for what no schema can say, with one of the codes in `BEYOND_SCHEMAS`; one
that does not fit is refused.
"""

from functools import cache
from typing import Any  # a JSON document

import msgspec
from msgspec import Raw, Struct

from tandem import __version__
from tandem.core.values import Cause
from tandem.server.api.body import Document, NativeSampling, Routing, StreamOptions, StructuredOutputs
from tandem.server.api.bounds import MAX_PORT, MAX_ROOM
from tandem.server.api.errors import Code, Problem
from tandem.server.api.foreign_fields import idle_values
from tandem.server.api.limits import Task
from tandem.server.api.openapi_bodies import (
    ENDPOINTS,
    KEEPS,
    KEEPS_NONE,
    NARROWER,
    NULL,
    OF_ROUTING,
    OTHERS,
    RULES,
    WITHIN,
    Schema,
)
from tandem.server.api.responses import ReasoningConfig, ResponseStreamOptions

BEYOND_SCHEMAS: dict[Code, str] = {
    Problem.INVALID_COMBINATION: "values that are right each by itself and not together, which no schema can compare: "
    "`min_tokens` above `max_tokens`, `best_of` other than `n`, a list that is to have one value for each prompt or "
    "sample, more samples or log-probabilities in all than one request may have, names that have to be distinct, a "
    "`tool_choice` that `tools` do not have, `continue_final_message` behind another one's message, two names of "
    "the DP rank that contradict each other, a `bootstrap_room` without the `bootstrap_host` that a decode needs",
    Problem.INVALID_GRAMMAR: "a JSON schema, regular expression, grammar or structural tag that does not compile, "
    "or is too large: it is in a language of its own",
    Cause.GRAMMAR_TOO_COMPLEX: "a grammar or schema that compiles and has too many ways on behind its first tokens",
    Problem.REFUSED_BY_TEMPLATE: "messages, or variables, that the model's chat template does not take",
    Problem.MODEL_NOT_FOUND: "a `model` that is not among those of `/v1/models`",
    Problem.PREVIOUS_RESPONSE_NOT_FOUND: "a `previous_response_id` that is not kept, or not for this API key",
    Problem.HOST_NOT_ALLOWED: "a `bootstrap_host` that is no host, is unknown, or that this server may not connect to",
    Cause.CONTEXT_LENGTH_EXCEEDED: "a prompt that has more tokens than the context of the model",
    Cause.OUT_OF_PAGES: "a prompt that is larger than the KV pool",
    Cause.ROUTE_CONFLICT: "a `disagg_prefill_dp_rank` that the prefill does not have, or routed otherwise",
    Problem.DUPLICATE_RID: "a `rid` that another request has at the same time",
    Cause.DUPLICATE_ROOM: "a `bootstrap_room` that another prompt has at the same time",
    Cause.DEADLINE_EXCEEDED: "a `timeout` that is over before the first token",
}
RESPONSES, COUNT_INPUT = "/v1/responses", "/v1/responses/input_tokens"
COUNTS = ("/v1/messages/count_tokens", COUNT_INPUT)
WITHIN_BODIES = (StreamOptions, StructuredOutputs, NativeSampling, ReasoningConfig, ResponseStreamOptions)
OF_PAIR = ("bootstrap_host", "bootstrap_port", "bootstrap_room")  # a router's to say, whatever a client says
TOKENS = ("prompt", "input_ids", "tokens", "stop_token_ids", "token_ids_logprob")  # fields of ids
SAFE_ID: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_-]+$"}
READS = {
    "/": "What this is.",
    "/docs": "This document as a page.",
    "/v1/models": "The served model.",
    "/v1/models/{id}": "The served model.",
    "/v1/responses/{id}": "A stored response.",
    "/v1/responses/{id}/input_items": "What a stored response was an answer to.",
    "/health": "200 while new requests are accepted and make progress, else 503.",
    "/ready": "As /health.",
    "/ping": "As /ready.",
    "/health_generate": "Generates one token, unless a request has just ended well.",
    "/version": "Version of the server.",
    "/metrics": "Prometheus text.",
    "/server_info": "Settings and state, and of each data-parallel rank whether it is well.",
    "/model_info": "About the model.",
    "/v1/loads": "Load per data-parallel rank.",
    "/get_load": "Load, as a list.",
    "/load": "How many requests are here.",
    "/debug/waits": "Every waiting request: reason, owner, age, deadline.",
    "/debug/state": "Pools and queues.",
    "/debug/pd": "Requests on their way through prefill and decode, as a page for people.",
    "/debug/pd/data": "What it shows.",
    "/debug/faults": "The test hooks, with --enable-fault-injection.",
}


def bounds(
    dp_size: int, vocab_size: int, *, is_paired: bool = False, has_priorities: bool = False
) -> dict[str, Schema]:
    """Of numbers whose type allows more than this server does. is_paired: it reads what a router says of the pair."""
    rank: Schema = {"minimum": 0, "maximum": dp_size - 1}
    token: Schema = {"minimum": 0, "maximum": vocab_size - 1}
    ranks = dict.fromkeys(("routed_dp_rank", "data_parallel_rank"), rank)
    found = {**ranks, **dict.fromkeys(TOKENS, token)}
    if not has_priorities:
        found["priority"] = {"minimum": 0, "maximum": 0}
    if is_paired:
        found["bootstrap_room"] = {"minimum": 1, "maximum": MAX_ROOM}
        found["bootstrap_port"] = {"minimum": 1, "maximum": MAX_PORT}
    return found


@cache
def openapi_document(
    role: str,
    dp_size: int = 1,
    task: Task = Task.TOKENS,
    vocab_size: int = 1 << 31,
    *,
    needs_room: bool = False,
    has_priorities: bool = False,
) -> Schema:
    """Without what servers of other tasks are for: here it is only refused."""
    is_paired = role in ("prefill", "decode")
    narrower = bounds(dp_size, vocab_size, is_paired=is_paired, has_priorities=has_priorities)
    endpoints = ENDPOINTS[task]
    shared = [Routing, *(WITHIN_BODIES if task is Task.TOKENS else (Document,))]
    kinds = [*shared, *dict.fromkeys(kind for kind, _, _ in (endpoints | OTHERS).values())]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in kinds:
        drop_unoffered(components[kind.__name__], kind)
        for name, schema in components[kind.__name__]["properties"].items():
            narrow(schema, ("integer", "number"), narrower.get(name, {}))
            if name == "logit_bias":
                schema["propertyNames"] = {"pattern": f"^({decimals_to(vocab_size - 1)})$"}
        if kind in shared:
            within = [WITHIN[kind.__name__]] if kind.__name__ in WITHIN else []
            components[kind.__name__]["allOf"] = [*within, refused_fields(kind)]
    if is_paired:
        room: Schema = {"pattern": f"^({decimals_to(MAX_ROOM, least=1)})$"}
        narrow(components["Routing"]["properties"]["bootstrap_room"], ("string",), room)
    if needs_room or role == "prefill":
        components["Routing"]["required"] = ["bootstrap_room"]
        drop_null(components["Routing"]["properties"]["bootstrap_room"])
    paths: dict[str, Schema] = {path: {"get": operation(text)} for path, text in READS.items()}
    paths["/v1/responses/{id}"]["delete"] = operation("Forget a stored response.")
    for path in (path for path in paths if "{id}" in path):
        for made in paths[path].values():
            made["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": SAFE_ID}]
    beside = [reference(Routing), OF_ROUTING]
    still = {
        path: [*([NARROWER[path]] if path in NARROWER else []), *RULES.get(path, ())] for path in (*endpoints, *OTHERS)
    }
    for path in still.keys() & {RESPONSES, COUNT_INPUT}:
        still[path].append(KEEPS_NONE if is_paired else KEEPS)
    for path, (kind, fields, text) in endpoints.items():
        parts = [reference(kind), with_one(fields, of="oneOf"), *still[path], *beside, refused_fields(kind)]
        paths[path] = {"post": operation(text, {"allOf": parts})}
    said: Schema = {"properties": components["Routing"]["properties"]}  # of what is counted: read, and not needed
    for path, (kind, fields, text) in OTHERS.items():
        parts = [reference(kind), with_one(fields, of="anyOf"), *still[path], refused_fields(kind)]
        paths[path] = {"post": operation(text, {"allOf": [*parts, *([said] if path in COUNTS else ())]})}
    paths["/debug/faults"]["put"] = operation("Change the test hooks.", {"type": "object"})
    paths["/ping"]["post"] = operation(READS["/ping"])
    paths["/flush_cache"] = {"post": operation("Drop cached pages that nobody holds.")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": __version__, "description": beyond_schemas()},
        "paths": paths,
        "components": {"schemas": components},
    }


def behind_router(document: Schema) -> Schema:
    """A decode's document as what its router offers: that pairs by itself, keeps responses, and has no debug pages.

    Whatever is not as `openapi_document` has it stays as it is.
    """
    paths = {
        path: with_routers_body(item) for path, item in document["paths"].items() if not path.startswith("/debug/")
    }
    made = document | {"paths": paths}
    match document.get("components"):
        case {"schemas": {"Routing": {"properties": dict(fields), **routing}, **schemas}}:
            left = {name: schema for name, schema in fields.items() if name not in OF_PAIR}
            made["components"] = {"schemas": schemas | {"Routing": routing | {"properties": left, "required": []}}}
        case _:
            pass
    return made


def with_routers_body(item: Any) -> Any:
    """A path whose POST takes what a router takes."""
    match item:
        case {"post": dict(operation)} if isinstance(parts := schema_of(operation).get("allOf"), list):
            routed = [KEEPS if part == KEEPS_NONE else part for part in parts]
            return item | {"post": operation | {"requestBody": json_body({"allOf": routed})}}
        case _:
            return item


def json_body(schema: Schema) -> Schema:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def schema_of(operation: Schema) -> Schema:
    """Of its body; empty where it has none."""
    match operation:
        case {"requestBody": {"content": {"application/json": {"schema": dict(schema)}}}}:
            return schema
        case _:
            return {}


def beyond_schemas() -> str:
    """In Markdown: why a body that fits its schema may be refused all the same."""
    lines = [f"* `{code.value}`: {text}." for code, text in BEYOND_SCHEMAS.items()]
    return "\n".join(["A body that fits its schema is refused for these reasons only, by `error.code`:", "", *lines])


def decimals_to(most: int, *, least: int = 0) -> str:
    """A regular expression for the whole numbers from `least`, 0 or 1, to `most`, without leading zeros."""
    digits = str(most)
    ways = [f"[1-9][0-9]{{{length}}}" for length in range(1, len(digits) - 1)]  # of fewer digits
    ways.insert(0, f"[{least}-9]" if len(digits) > 1 else f"[{least}-{digits}]")
    for place, digit in enumerate(map(int, digits)) if len(digits) > 1 else ():  # equal up to this place, lower there
        lowest = 0 if place else 1
        if digit > lowest:
            ways.append(f"{digits[:place]}[{lowest}-{digit - 1}][0-9]{{{len(digits) - place - 1}}}")
    return "|".join([*ways, digits])


def drop_unoffered(schema: dict[str, Any], kind: type[Struct]) -> None:
    """Fields that exist only to be refused are no part of the offer, nor are older names of `structured_outputs`."""
    for field in msgspec.structs.fields(kind):
        if field.type is Raw or field.name.startswith("guided_"):
            del schema["properties"][field.encode_name]
            schema["required"] = [name for name in schema.get("required", []) if name != field.encode_name]


def narrow(schema: Schema, kinds: tuple[str, ...], bounds: Schema) -> None:
    """Every value of these kinds in the schema of one field, alone or in a list."""
    if schema.get("type") in kinds:
        schema |= bounds
    for inner in values_of(schema):
        narrow(inner, kinds, bounds)


def drop_null(schema: Schema) -> None:
    """What must be there must be something, and so must each of a list."""
    if "anyOf" in schema:
        schema["anyOf"] = [inner for inner in schema["anyOf"] if inner != NULL]
        schema.pop("default", None)
    for inner in values_of(schema):
        drop_null(inner)


def values_of(schema: Schema) -> list[Schema]:
    """What the value of a field, or each in a list of them, may be."""
    return [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]


def reference(kind: type[Struct]) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def with_one(fields: dict[str, Schema], *, of: str) -> Schema:
    """An object that has one of these fields, or with `anyOf` more. The others may be there as null."""
    others: Schema = {key: {"type": "null"} for key in fields} if of == "oneOf" else {}
    return {
        of: [
            {"type": "object", "required": [name], "properties": others | {name: schema}}
            for name, schema in fields.items()
        ]
    }


def refused_fields(kind: type[Struct]) -> Schema:
    """The fields that a body has only to be refused where they ask for something."""
    names = [field.encode_name for field in msgspec.structs.fields(kind) if field.type is Raw]
    return {
        "description": "What other servers read under these names is refused.",
        "properties": {name: {"enum": list(idle_values(name))} for name in names},
    }


def operation(text: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "summary": text,
        "responses": {"200": {"description": "as asked"}, "default": {"description": "an object `error`"}},
    }
    if schema is not None:
        made["requestBody"] = json_body(schema)
    return made
