"""What somebody sees who opens the address of a server or router in a browser: what it is, and what it offers.

`/docs` is one static page made from the OpenAPI document, without scripts and without anything from elsewhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape

from starlette.responses import HTMLResponse
from starlette.routing import BaseRoute, Route

from tandem import __version__
from tandem.server.api.limits import Task
from tandem.server.api.openapi import behind_router, openapi_document, schema_of
from tandem.server.api.openapi_bodies import Schema

ROLE_HEADER = "x-tandem-role"  # of answers to /health: a router looks there whether a worker is what it was told of
BOOTSTRAP_PORT_HEADER = "x-tandem-bootstrap-port"  # a prefill's, there too, for a router that was told none
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
INT64 = 1 << 62  # what is bounded by its type alone needs no word
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem; border-top: 1px solid #ddd; padding-top: 1rem }
b { display: inline-block; min-width: 4.2em; color: #06c } b.get { color: #080 } b.delete { color: #b00 }
code, pre, td:first-child, td:nth-child(2) { font-family: ui-monospace, monospace; font-size: .9em }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto } table { border-collapse: collapse; margin: .5rem 0 }
td { padding: .1rem 1rem .1rem 0; vertical-align: top } p { margin: .2rem 0 } .light { color: #777 }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd } pre { background: #22252b }
h2 { border-color: #444 } b { color: #6af } b.get { color: #7c7 } b.delete { color: #f88 } a { color: #8bf } }
"""
EXAMPLE = """curl -s http://HOST:PORT/v1/chat/completions -H 'content-type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many?"}]}'"""


def about(routes: Iterable[BaseRoute], *, role: str, models: Sequence[str]) -> Schema:
    """`/`. models: as they are named in requests."""
    served = [route for route in routes if isinstance(route, Route)]
    pages = [f"{method} {route.path}" for route in served for method in sorted((route.methods or set()) - {"HEAD"})]
    return {
        "name": "tandem",
        "version": __version__,
        "role": role,
        "models": list(models),
        "docs": "/docs",
        "openapi": "/openapi.json",
        "endpoints": pages,
    }


@cache
def docs_response(role: str, dp_size: int = 1, task: Task = Task.TOKENS) -> HTMLResponse:
    """`/docs`. A router offers what a decode does, but for the debug pages."""
    is_router = role == "router"
    document = openapi_document("decode" if is_router else role, dp_size, task)
    page = docs_page(behind_router(document) if is_router else document, role)
    return HTMLResponse(page, headers={"content-security-policy": POLICY, "x-content-type-options": "nosniff"})


def docs_page(document: Schema, role: str) -> str:
    title = f"Tandem {document['info']['version']}, {role}"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>",
        "<p>The same as a document for programs: <a href=/openapi.json>/openapi.json</a>. Errors are an object ",
        "<code>error</code> with a <code>code</code>, a <code>message</code> and the <code>param</code> at fault.",
        f"<pre>{escape(EXAMPLE)}</pre>",
    ]
    offered = [(method, path, item[method]) for path, item in document["paths"].items() for method in item]
    for method, path, operation in sorted(offered, key=lambda it: "requestBody" not in it[2]):  # else as they are
        parts += operation_lines(method, path, operation, document)
    return "".join(parts)


def operation_lines(method: str, path: str, operation: Schema, document: Schema) -> Iterator[str]:
    name = f"{method}-{path}"
    yield f"<h2 id='{escape(name)}'><b class={method}>{method.upper()}</b> <code>{escape(path)}</code></h2>"
    yield f"<p>{escape(operation['summary'])}</p>"
    body = schema_of(operation)
    fields = fields_of(body, document)
    if fields:
        yield "<details><summary class=light>fields of the body</summary><table>"
        for field, schema in fields.items():
            yield f"<tr><td>{escape(field)}</td><td>{escape(type_text(schema))}</td></tr>"
        yield "</table>"
        for part in body.get("allOf", ()):
            if "description" in part:
                yield f"<p class=light>{escape(part['description'])}</p>"
        yield "</details>"


def fields_of(schema: Schema, document: Schema) -> dict[str, Schema]:
    """Of a body, whatever its schema is put together from; the narrowest of what is said of a field."""
    found = dict(schema.get("properties", {}))
    for part in (*schema.get("allOf", ()), *schema.get("oneOf", ()), *schema.get("anyOf", ())):
        if "description" in part:  # it says what holds between fields
            continue
        inner = resolved(part, document)
        found |= fields_of(inner, document)
    return found


def resolved(schema: Schema, document: Schema) -> Schema:
    name = schema.get("$ref", "").removeprefix("#/components/schemas/")
    return document["components"]["schemas"][name] if name else schema


def type_text(schema: Schema) -> str:
    """In a few words: what may stand there."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        return ", ".join(repr(value) for value in schema.get("enum", [schema.get("const")]) if value is not None)
    if "anyOf" in schema or "oneOf" in schema:
        parts = [type_text(part) for part in schema.get("anyOf", schema.get("oneOf", ())) if part != {"type": "null"}]
        return " or ".join(dict.fromkeys(parts))
    kinds = schema.get("type", "any")
    names = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    of = f" of {type_text(schema['items'])}" if "items" in schema else ""
    named = " or ".join("list" + of if name == "array" else name for name in names)
    limits = " ".join(f"{sign} {schema[key]}" for key, sign in BOUNDS.items() if abs(schema.get(key, INT64)) < INT64)
    return f"{named} {limits}".strip()
