"""`/openapi.json`: the bodies that are really decoded, nothing that is not.

A body that fits its schema is refused only for what a schema cannot well say: what the model or the server's settings
decide (token ids, lengths, the model's name), and fields that need one another.
"""

from functools import cache
from typing import Any  # a JSON document

import msgspec
from msgspec import Raw, Struct

from tandem import __version__
from tandem.server.api.body import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Document,
    EmbeddingBody,
    NativeBody,
    NativeSampling,
    RerankBody,
    Routing,
    ScoreBody,
    StreamOptions,
    StructuredOutputs,
    TokenizeBody,
)
from tandem.server.api.bounds import MAX_ROOM
from tandem.server.api.messages import MessagesBody
from tandem.server.api.responses import ROLES, ResponsesBody
from tandem.server.api.validation import Task

Schema = dict[str, Any]
LIST: Schema = {"type": "array", "minItems": 1}
TEXT: Schema = {"type": "string", "minLength": 1}
PROMPT: Schema = {"type": ["string", "array"], "minLength": 1, "minItems": 1}
ID: Schema = {"type": "integer", "minimum": 0}
TEXTS_OR_ONE: Schema = {"anyOf": [TEXT, LIST | {"items": TEXT}]}
IDS_OR_ONE: Schema = {"anyOf": [LIST | {"items": ID}, LIST | {"items": LIST | {"items": ID}}]}
GIVEN: Schema = {"not": {"type": "null"}}
PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": {"type": ["string", "array", "null"], "items": PART}},
}
TEXTS: Schema = {"type": ["string", "array"], "items": PART, "minItems": 1}
TURN: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": TEXTS},
}
ITEM: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": list(ROLES)},
        "content": {
            "type": ["string", "array"],
            "items": PART | {"properties": {"type": {"const": "input_text"}, "text": {"type": "string"}}},
        },
    },
}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
# Per path: the body, the fields one of which must be there and what it must be then, and what the path does.
GENERATION: dict[str, tuple[type[Struct], dict[str, Schema], str]] = {
    "/v1/chat/completions": (ChatBody, {"messages": LIST | {"items": MESSAGE}}, "Answer a conversation."),
    "/v1/completions": (CompletionBody, {"prompt": {"anyOf": [TEXTS_OR_ONE, IDS_OR_ONE]}}, "Continue a text."),
    "/v1/messages": (MessagesBody, {"messages": LIST | {"items": TURN}}, "Answer a conversation, as Anthropic has it."),
    "/v1/responses": (
        ResponsesBody,
        {"input": PROMPT | {"items": ITEM}},
        "Answer a conversation, as OpenAI's Responses API has it.",
    ),
    "/generate": (
        NativeBody,
        {"text": TEXTS_OR_ONE, "input_ids": IDS_OR_ONE},
        "SGLang's dialect; streams are cumulative.",
    ),
}
MESSAGES: Schema = {
    "system": {"type": ["string", "array", "null"], "items": PART},
    "tools": {"items": {"required": ["name", "input_schema"], "properties": {"input_schema": {"type": "object"}}}},
    "tool_choice": {"properties": {"type": {"enum": ["auto", "none"]}}, "required": ["type"]},
    "thinking": {"properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}}, "required": ["type"]},
}
TEXTS_OF_ONE: Schema = {"type": ["string", "array"], "minLength": 1, "minItems": 1, "items": TEXT}
FITTING: dict[str, tuple[type[Struct], dict[str, Schema], str]] = {
    "/v1/rerank": (RerankBody, {"query": TEXT}, "How well documents fit a query, best first."),
    "/v1/score": (ScoreBody, {"text_1": TEXT}, "How well one text fits others."),
}
EMBEDDING: dict[str, tuple[type[Struct], dict[str, Schema], str]] = {
    "/v1/embeddings": (EmbeddingBody, {"input": TEXTS_OF_ONE}, "The vector of each text."),
    **FITTING,
}
ENDPOINTS = {Task.TOKENS: GENERATION, Task.EMBEDDINGS: EMBEDDING, Task.SCORES: FITTING}
NO_STREAM: Schema = {"enum": [False, None]}
# What else a body must hold, or what a member must be that its type leaves open.
NARROWER: dict[str, Schema] = {
    "/v1/embeddings": {"properties": {"normalize": {"enum": [True, None]}, "stream": NO_STREAM}},
    "/v1/rerank": {
        "required": ["documents"],
        "properties": {
            "documents": LIST | {"items": {"type": ["string", "object"], "minLength": 1, "properties": {"text": TEXT}}},
            "stream": NO_STREAM,
        },
    },
    "/v1/score": {"required": ["text_2"], "properties": {"text_2": TEXTS_OF_ONE, "stream": NO_STREAM}},
    "/v1/chat/completions": {
        "properties": {
            "modalities": {"enum": [None, ["text"]]},
            "function_call": {"enum": [None, "none", "auto"]},
        }
    },
    "/v1/messages": {
        "required": ["max_tokens"],
        "properties": MESSAGES | {"max_tokens": {"type": "integer"}},
    },
    "/v1/messages/count_tokens": {"properties": MESSAGES},
    "/tokenize": {"properties": {"messages": {"items": MESSAGE}}},
    "/v1/responses": {
        "properties": {
            "n": {"enum": [1, None]},
            "kept_items": {"type": "null"},
            "previous_response_id": {"type": "null"},
            "store": {"enum": [False, None]},
            "truncation": {"enum": ["disabled", None]},
            "service_tier": {"enum": ["auto", "default", None]},
            "tool_choice": {"enum": ["auto", "none", None]},
            "tools": {
                "items": {"required": ["type", "name"], "properties": {"type": {"const": "function"}}},
            },
            "text": {
                "properties": {
                    "verbosity": {"enum": ["medium", None]},
                    "format": {"properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
                }
            },
        },
    },
}
OTHERS: dict[str, tuple[type[Struct], dict[str, Schema], str]] = {
    "/tokenize": (
        TokenizeBody,
        {"prompt": GIVEN, "text": GIVEN, "messages": {"type": "array", "items": MESSAGE}},
        "Text to token ids.",
    ),
    "/v1/messages/count_tokens": (
        MessagesBody,
        {"messages": LIST | {"items": TURN}},
        "How many tokens such a prompt has.",
    ),
    "/detokenize": (
        DetokenizeBody,
        {"tokens": {"anyOf": [IDS, {"type": "array", "items": IDS}]}},
        "Token ids to text.",
    ),
    "/abort_request": (AbortBody, {"rid": TEXT, "abort_all": {"const": True}}, "Abort by exact rid."),
}
ROOM: Schema = {  # without which a prefill does nothing
    "type": "object",
    "required": ["bootstrap_room"],
    "properties": {"bootstrap_room": {"type": ["integer", "string", "array"], "minimum": 1, "maximum": MAX_ROOM}},
}
IDS_AS_KEYS: Schema = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
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
    "/health_generate": "Generates one token, unless a request has just ended well.",
    "/version": "Version of the server.",
    "/metrics": "Prometheus text.",
    "/server_info": "Settings and state.",
    "/model_info": "About the model.",
    "/v1/loads": "Load per data-parallel rank.",
    "/get_load": "Load, as a list.",
    "/debug/waits": "Every waiting request: reason, owner, age, deadline.",
    "/debug/state": "Pools and queues.",
    "/debug/pd": "Requests on their way through prefill and decode, as a page for people.",
    "/debug/pd/data": "What it shows.",
    "/debug/faults": "The test hooks, with --enable-fault-injection.",
}


def bounds(dp_size: int) -> dict[str, Schema]:
    """Of numbers whose type allows more than this server does."""
    rank: Schema = {"minimum": 0, "maximum": dp_size - 1}
    return {"priority": {"minimum": 0, "maximum": 0}, "routed_dp_rank": rank, "data_parallel_rank": rank}


@cache
def openapi_document(role: str, dp_size: int = 1, task: Task = Task.TOKENS) -> Schema:
    """Without what servers of other tasks are for: here it is only refused."""
    narrower, endpoints = bounds(dp_size), ENDPOINTS[task]
    shared = (StreamOptions, StructuredOutputs, NativeSampling) if task is Task.TOKENS else (Document,)
    kinds = [Routing, *shared, *dict.fromkeys(kind for kind, _, _ in (endpoints | OTHERS).values())]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in kinds:
        drop_refused(components[kind.__name__], kind)
        for name, schema in components[kind.__name__]["properties"].items():
            set_bounds(schema, narrower.get(name, {}))
            if name == "logit_bias":
                schema["propertyNames"] = IDS_AS_KEYS
    paths: dict[str, Schema] = {path: {"get": operation(text)} for path, text in READS.items()}
    paths["/v1/responses/{id}"]["delete"] = operation("Forget a stored response.")
    for path in (path for path in paths if "{id}" in path):
        for made in paths[path].values():
            made["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": SAFE_ID}]
    beside = [reference(Routing), *([ROOM] if role == "prefill" else [])]
    still = {path: [NARROWER[path]] if path in NARROWER else [] for path in (*endpoints, *OTHERS)}
    for path, (kind, fields, text) in endpoints.items():
        parts = [reference(kind), with_one(fields, of="oneOf"), *still[path], *beside, refused_fields(kind)]
        paths[path] = {"post": operation(text, {"allOf": parts})}
    for path, (kind, fields, text) in OTHERS.items():
        paths[path] = {
            "post": operation(
                text, {"allOf": [reference(kind), with_one(fields, of="anyOf"), *still[path], refused_fields(kind)]}
            )
        }
    paths["/debug/faults"]["put"] = operation("Change the test hooks.", {"type": "object"})
    paths["/flush_cache"] = {"post": operation("Drop cached pages that nobody holds.")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def drop_refused(schema: dict[str, Any], kind: type[Struct]) -> None:
    """Fields that exist only to be refused are not part of the offer."""
    for field in msgspec.structs.fields(kind):
        if field.type is Raw:
            del schema["properties"][field.encode_name]
            schema["required"] = [name for name in schema.get("required", []) if name != field.encode_name]


def set_bounds(schema: Schema, bounds: Schema) -> None:
    """Of every number in the schema of one field, alone or in a list."""
    if schema.get("type") in ("integer", "number"):
        schema |= bounds
    for inner in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])):
        set_bounds(inner, bounds)


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
        "properties": {key: {"type": "null"} for key in names},
    }


def operation(text: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "summary": text,
        "responses": {"200": {"description": "as asked"}, "default": {"description": "an object `error`"}},
    }
    if schema is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return made
