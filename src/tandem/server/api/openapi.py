"""`/openapi.json`: the bodies that are really decoded, nothing that is not."""

from functools import cache
from typing import Any  # a JSON document

import msgspec
from msgspec import Raw, Struct

from tandem import __version__
from tandem.server.api.body import ChatBody, CompletionBody, NativeBody, NativeSampling, Routing, StreamOptions

BODIES: dict[str, tuple[type[Struct], tuple[str, ...], str]] = {
    "/v1/chat/completions": (ChatBody, ("messages",), "Answer a conversation."),
    "/v1/completions": (CompletionBody, ("prompt",), "Continue a text."),
    "/generate": (NativeBody, (), "SGLang's dialect; streams are cumulative."),
}
READS = {
    "/v1/models": "The served model.",
    "/v1/models/{id}": "The served model.",
    "/health": "200 while new requests are accepted and make progress, else 503.",
    "/ready": "As /health.",
    "/health_generate": "Generates one token, unless a request has just ended well.",
    "/version": "Version of the server.",
    "/metrics": "Prometheus text.",
    "/server_info": "Settings and state.",
    "/model_info": "Facts about the model.",
    "/v1/loads": "Load per data-parallel rank.",
    "/get_load": "Load, as a list.",
    "/flush_cache": "Drop cached pages that nobody holds.",
    "/debug/waits": "Every waiting request: reason, owner, age, deadline.",
    "/debug/state": "Pools and queues.",
    "/debug/faults": "The test hooks, with --enable-fault-injection.",
}


@cache
def openapi_document() -> dict[str, Any]:
    kinds = [Routing, StreamOptions, NativeSampling, *(kind for kind, _, _ in BODIES.values())]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in kinds:
        drop_refused(components[kind.__name__], kind)
    paths: dict[str, Any] = {path: {"get": operation(text)} for path, text in READS.items()}
    paths["/v1/models/{id}"]["get"]["parameters"] = [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    for path, (kind, required, text) in BODIES.items():
        paths[path] = {"post": operation(text, body_schema(kind, required))}
    paths["/tokenize"] = {"post": operation("Text to token ids.", {"type": "object"})}
    paths["/detokenize"] = {"post": operation("Token ids to text.", {"type": "object"})}
    paths["/abort_request"] = {"post": operation("Abort by exact rid.", {"type": "object"})}
    paths["/debug/faults"]["put"] = operation("Change the test hooks.", {"type": "object"})
    paths["/flush_cache"]["post"] = operation(READS["/flush_cache"])
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


def body_schema(kind: type[Struct], required: tuple[str, ...]) -> dict[str, Any]:
    own: dict[str, Any] = {"$ref": f"#/components/schemas/{kind.__name__}"}
    routing = {"$ref": "#/components/schemas/Routing"}
    return {"allOf": [own, routing, {"type": "object", "required": list(required)}]}


def operation(text: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "summary": text,
        "responses": {"200": {"description": "as asked"}, "default": {"description": "an object `error`"}},
    }
    if schema is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return made
