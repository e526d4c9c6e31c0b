"""What bodies have to be, beyond the types of their fields: the tables from which `openapi.py` makes its document.

Here are the fields one of which a body must have, what members must be that their types leave open (`NARROWER`), and
what holds between fields (`RULES`), as far as a schema can say it.
"""

from typing import Any  # a JSON document

from msgspec import Struct

from tandem.server.api.body import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    NativeBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
)
from tandem.server.api.bounds import MAX_LOGPROB_IDS, MAX_PROMPTS, MAX_RID_CHARS, MAX_TOOLS
from tandem.server.api.chat_form import AUTO, MAX_NAME_CHARS, NONE, REQUIRED, TEXT_PARTS
from tandem.server.api.chat_form import NAME as NAME_PATTERN
from tandem.server.api.limits import Task
from tandem.server.api.messages import KEPT_THOUGHTS, MessagesBody
from tandem.server.api.responses import MAX_PART_CHARS, ROLES, SEALED_THOUGHTS, ResponsesBody

Schema = dict[str, Any]
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
TEXT_PART: Schema = PART | {"properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}}}
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
        "content": {"type": ["string", "array", "null"], "items": {"anyOf": [TEXT_PART, REFUSAL, {"type": "string"}]}},
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
            "items": TEXT_PART,
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
