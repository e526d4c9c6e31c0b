"""`/openapi.json`: the bodies that are really decoded, nothing that is not.

A body that fits its schema is refused only for what no schema can say, with one of the codes in `BEYOND_SCHEMAS`; one
that does not fit is refused.
"""

from functools import cache
from typing import Any  # a JSON document

import msgspec
from msgspec import Raw, Struct

from tandem import __version__
from tandem.core.values import Cause
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
from tandem.server.api.bounds import MAX_LOGPROB_IDS, MAX_PORT, MAX_PROMPTS, MAX_RID_CHARS, MAX_ROOM, MAX_TOOLS
from tandem.server.api.chat_form import AUTO, MAX_NAME_CHARS, NONE, REQUIRED
from tandem.server.api.chat_form import NAME as NAME_PATTERN
from tandem.server.api.errors import Code, Problem
from tandem.server.api.foreign_fields import idle_values
from tandem.server.api.limits import Task
from tandem.server.api.messages import KEPT_THOUGHTS, MessagesBody
from tandem.server.api.responses import (
    MAX_PART_CHARS,
    ROLES,
    SEALED_THOUGHTS,
    ReasoningConfig,
    ResponsesBody,
    ResponseStreamOptions,
)

Schema = dict[str, Any]
BEYOND_SCHEMAS: dict[Code, str] = {
    Problem.INVALID_COMBINATION: "values that are right each by itself and not together, which no schema can compare: "
    "`min_tokens` above `max_tokens`, `best_of` other than `n`, a list that is to have one value for each prompt or "
    "sample, more samples or log-probabilities in all than one request may have, names that have to be distinct, a "
    "`tool_choice` that `tools` do not have, `continue_final_message` behind another one's message, two names of "
    "the DP rank that contradict each other, a `bootstrap_room` without the `bootstrap_host` that a decode needs",
    Problem.INVALID_GRAMMAR: "a JSON schema, regular expression, grammar or structural tag that does not compile, "
    "or is too large: it is in a language of its own",
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
LIST: Schema = {"type": "array", "minItems": 1}
TEXT: Schema = {"type": "string", "minLength": 1}
PROMPT: Schema = {"type": ["string", "array"], "minLength": 1, "minItems": 1}
ID: Schema = {"type": "integer", "minimum": 0}
PROMPTS: Schema = LIST | {"maxItems": MAX_PROMPTS}
TEXTS_OR_ONE: Schema = {"anyOf": [TEXT, PROMPTS | {"items": TEXT}]}
IDS_OR_ONE: Schema = {"anyOf": [LIST | {"items": ID}, PROMPTS | {"items": LIST | {"items": ID}}]}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}
GIVEN: Schema = {"not": {"type": "null"}}
PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
REFUSAL: Schema = {
    "type": "object",
    "required": ["type", "refusal"],
    "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
}
MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {"type": ["string", "array", "null"], "items": {"anyOf": [PART, REFUSAL]}},
        "tool_calls": {
            "type": ["array", "null"],
            "items": {
                "type": "object",
                "required": ["function"],
                "properties": {
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
                    },
                },
            },
        },
    },
}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS, "pattern": NAME_PATTERN}
PARAMETERS: Schema = {"type": ["object", "null"]}
FUNCTION: Schema = {"type": "object", "required": ["name"], "properties": {"name": NAME, "parameters": PARAMETERS}}
TEXTS: Schema = {"type": ["string", "array"], "items": PART, "minItems": 1}
TURN: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": TEXTS,
        "clear_at": {"enum": ["never", None]},
        "output_config": {"enum": [{}, None]},
    },
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
    "tools": {
        "items": {
            "required": ["name", "input_schema"],
            "properties": {"type": {"enum": ["custom", None]}, "name": NAME, "input_schema": OBJECT},
        }
    },
    "tool_choice": {
        "anyOf": [
            NULL,
            {"required": ["type"], "properties": {"type": {"enum": ["auto", "any", "none"]}}},
            {"required": ["type", "name"], "properties": {"type": {"const": "tool"}, "name": NAME}},
        ]
    },
    "thinking": {"properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}}, "required": ["type"]},
    "context_management": {
        "properties": {
            "edits": {
                "type": ["array", "null"],
                "items": {
                    "type": "object",
                    "required": ["type", "keep"],
                    "properties": {"type": {"const": KEPT_THOUGHTS}, "keep": {"enum": ["all", {"type": "all"}]}},
                    "additionalProperties": False,
                },
            }
        }
    },
    "output_config": {
        "properties": {
            "format": {
                "properties": {"type": {"const": "json_schema"}, "schema": OBJECT},
                "required": ["type", "schema"],
            }
        }
    },
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


def tool_choice(field: str, schema: Schema) -> Schema:
    """field: by which a function is named. What allows several is flat where functions are, and needs types there."""
    function: Schema = {"type": {"const": "function"}, field: schema}
    one = OBJECT | {"required": list(function) if field == "name" else [field], "properties": function}
    some: Schema = {"mode": {"enum": [AUTO, REQUIRED]}, "tools": LIST | {"items": one}}
    if field != "name":
        some = {"allowed_tools": OBJECT | {"required": list(some), "properties": some}}
    some = {"type": {"const": "allowed_tools"}, **some}
    several = OBJECT | {"required": list(some), "properties": some}
    return {"anyOf": [{"enum": [AUTO, NONE, REQUIRED, None]}, one, several]}


def flat_function(name: Schema) -> Schema:
    """Of `/v1/responses`."""
    properties: Schema = {"type": {"const": "function"}, "name": name, "parameters": PARAMETERS}
    return {"required": ["type", "name"], "properties": properties}


PART_OF_NAME: Schema = NAME | {"maxLength": MAX_PART_CHARS}
TEMPLATE_VARIABLES: Schema = {"propertyNames": {"not": {"enum": ["messages", "add_generation_prompt"]}}}
PLAIN_FORMAT: Schema = {"type": ["object", "null"], "properties": {"type": {"const": "text"}}}  # bounds nothing
RESPONSE_FORMAT: Schema = {
    "anyOf": [
        NULL,
        {"properties": {"type": {"enum": ["text", "json_object"]}}},
        {
            "required": ["type", "json_schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {"type": "object", "properties": {"schema": PARAMETERS}},
            },
        },
        {"required": ["type"], "properties": {"type": {"const": "structural_tag"}}},
    ]
}
NO_STREAM: Schema = {"enum": [False, None]}
CHAT_TOOLS: Schema = {
    "type": ["array", "null"],
    "items": {"required": ["function"], "properties": {"type": {"const": "function"}, "function": FUNCTION}},
}
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
            "tools": CHAT_TOOLS,
            "tool_choice": tool_choice("function", FUNCTION),
            "response_format": RESPONSE_FORMAT,
            "chat_template_kwargs": TEMPLATE_VARIABLES,
        }
    },
    "/v1/completions": {"properties": {"response_format": RESPONSE_FORMAT}},
    "/generate": {
        "properties": {
            "token_ids_logprob": {
                "anyOf": [
                    NULL,
                    IDS | {"maxItems": MAX_LOGPROB_IDS},
                    {"type": "array", "items": IDS | {"maxItems": MAX_LOGPROB_IDS}},
                ]
            }
        }
    },
    "/v1/messages": {
        "required": ["max_tokens"],
        "properties": MESSAGES | {"max_tokens": {"type": "integer"}},
    },
    "/v1/messages/count_tokens": {"properties": MESSAGES},
    "/tokenize": {"properties": {"messages": {"items": MESSAGE, "minItems": 1}}},
    "/v1/responses": {
        "properties": {
            "n": {"enum": [1, None]},
            "truncation": {"enum": ["disabled", None]},
            "service_tier": {"enum": ["auto", "default", None]},
            "include": {"items": {"const": SEALED_THOUGHTS}},
            "reasoning": {"properties": {"summary": {"enum": ["auto", None]}}},
            "tools": {
                "items": {
                    "anyOf": [
                        flat_function(NAME),
                        {
                            "required": ["type", "name", "tools"],
                            "properties": {
                                "type": {"const": "namespace"},
                                "name": PART_OF_NAME,
                                "description": {"type": ["string", "null"]},
                                "tools": {
                                    "type": "array",
                                    "maxItems": MAX_TOOLS,
                                    "items": OBJECT | flat_function(PART_OF_NAME),
                                },
                            },
                        },
                    ]
                },
            },
            "tool_choice": tool_choice("name", NAME),
            "chat_template_kwargs": TEMPLATE_VARIABLES,
            "text": {
                "properties": {
                    "verbosity": {"enum": ["medium", None]},
                    "format": {
                        "anyOf": [
                            NULL,
                            {"properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
                            {
                                "properties": {"type": {"const": "json_schema"}, "name": NAME, "schema": OBJECT},
                                "required": ["type", "name", "schema"],
                            },
                        ]
                    },
                }
            },
        },
    },
}


def rule(text: str, *options: dict[str, Schema]) -> Schema:
    """One of these holds. In an option, a field that must not be absent says so by not taking null."""
    return {
        "description": text,
        "anyOf": [
            {"properties": fields, "required": [name for name, schema in fields.items() if not takes_null(schema)]}
            for fields in options
        ],
    }


def takes_null(schema: Schema) -> bool:
    return None in schema.get("enum", ()) or "null" in schema.get("type", ())


def at_most_one(fields: dict[str, Schema]) -> Schema:
    """Of these fields; by each what it is where it does not count."""
    others = [{other: idle for other, idle in fields.items() if other != name} for name in fields]
    return rule(f"At most one of {', '.join(fields)}.", *others)


# What holds between the fields of a body, as far as a schema can say it.
OFF: Schema = {"enum": [False, None]}
GRAMMARS: dict[str, Schema] = dict.fromkeys(("regex", "ebnf", "json_schema", "structural_tag"), NULL)
FORMS = GRAMMARS | {"response_format": PLAIN_FORMAT, "structured_outputs": NULL}
STRUCTURED = dict.fromkeys(("json", "regex", "choice", "grammar", "structural_tag"), NULL) | {"json_object": OFF}
OF_OPENAI = (
    rule(
        "stream_options needs stream, and prompt_logprobs are told in whole answers only.",
        {"stream": {"const": True}, "prompt_logprobs": NULL},
        {"stream": OFF, "stream_options": NULL},
    ),
    at_most_one(FORMS),
)
RULES: dict[str, tuple[Schema, ...]] = {
    "/v1/chat/completions": (
        *OF_OPENAI,
        rule("top_logprobs needs logprobs.", {"top_logprobs": {"enum": [0, None]}}, {"logprobs": {"const": True}}),
    ),
    "/v1/completions": OF_OPENAI,
    "/tokenize": (
        rule(
            "What stands beside messages is that of a chat.",
            {"messages": NULL},
            {
                "tools": CHAT_TOOLS,
                "tool_choice": tool_choice("function", FUNCTION) | {"type": ["string", "object", "null"]},
                "chat_template_kwargs": {"type": ["object", "null"]} | TEMPLATE_VARIABLES,
            },
        ),
    ),
    "/v1/responses": (
        at_most_one(
            GRAMMARS | {"text": {"type": ["object", "null"], "properties": {"format": PLAIN_FORMAT}}},
        ),
    ),
}
NARROWER["/v1/responses/input_tokens"] = NARROWER["/v1/responses"]
WITHIN: dict[str, Schema] = {"NativeSampling": at_most_one(GRAMMARS), "StructuredOutputs": at_most_one(STRUCTURED)}
RID: Schema = {"type": "string", "maxLength": MAX_RID_CHARS, "pattern": "^[ -~]*$"}
OF_ROUTING: Schema = {
    "properties": {
        "rid": {"anyOf": [NULL, RID, {"type": "array", "uniqueItems": True, "items": RID | {"minLength": 1}}]}
    }
}
OTHERS: dict[str, tuple[type[Struct], dict[str, Schema], str]] = {
    "/tokenize": (
        TokenizeBody,
        {"prompt": GIVEN, "text": GIVEN, "messages": LIST | {"items": MESSAGE}},
        "Text to token ids.",
    ),
    "/v1/messages/count_tokens": (
        MessagesBody,
        {"messages": LIST | {"items": TURN}},
        "How many tokens such a prompt has.",
    ),
    "/v1/responses/input_tokens": (
        ResponsesBody,
        {"input": PROMPT | {"items": ITEM}},
        "How many tokens such a prompt has.",
    ),
    "/detokenize": (
        DetokenizeBody,
        {"tokens": {"anyOf": [IDS, {"type": "array", "items": IDS}]}},
        "Token ids to text.",
    ),
    "/abort_request": (AbortBody, {"rid": TEXT, "abort_all": {"const": True}}, "Abort by exact rid."),
}
KEEPS: Schema = {"properties": {"kept_items": NULL}}  # responses: fills that in
KEEPS_NONE = rule(
    "This server keeps no responses; whoever does puts them into the body.",
    {"kept_items": NULL, "store": OFF, "previous_response_id": NULL},
    {"kept_items": {"type": "array", "items": ITEM}},
)
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
