"""Bodies that few clients send, each with how it is answered: 200, or the code that says what is wrong with it."""

from collections.abc import Iterator
from typing import Any  # JSON documents

from tandem.core.values import Cause
from tandem.server.api.errors import Code, Problem

Seldom = tuple[str, dict[str, Any], int | Code]  # path, body, status or code

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES, COUNT = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
BAD, MIXED, CANNOT, GRAMMAR = (
    Problem.INVALID_VALUE,
    Problem.INVALID_COMBINATION,
    Problem.UNSUPPORTED,
    Problem.INVALID_GRAMMAR,
)
USER = {"role": "user", "content": "How many?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "rest", "arguments": '{"days": 2}'}}
FUNCTION = {"type": "function", "function": {"name": "rest", "parameters": {"type": "object", "properties": {}}}}
FLAT = {"type": "function", "name": "rest", "parameters": {"type": "object", "properties": {}}}
TOOL = {"name": "rest", "input_schema": {"type": "object", "properties": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}

# What a field may say besides, of a chat.
OF_CHATS: tuple[tuple[dict[str, Any], int | Code], ...] = (
    ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER]}, 200),
    ({"messages": [{"role": "developer", "content": "Be brief."}, USER]}, 200),
    ({"messages": [{"role": "tool", "tool_call_id": "call_1", "content": "2"}, USER]}, 200),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, CANNOT),
    ({"messages": [{"content": "x"}]}, BAD),
    ({"tools": [FUNCTION], "tool_choice": "none"}, 200),
    ({"tool_choice": "required"}, MIXED),
    ({"stop_token_ids": [5], "logit_bias": {"20": 1.5}, "min_tokens": 1}, 200),
    ({"max_tokens": 3, "min_tokens": 4}, MIXED),
    ({"logit_bias": {"99999": 1}}, BAD),
    ({"stop": ["x"] * 17}, BAD),
    ({"top_logprobs": 2}, BAD),
    ({"functions": [{}]}, CANNOT),
    ({"priority": 1}, CANNOT),  # where it does not count
    ({"num_predict": 3}, CANNOT),
)
OF_FORMS: tuple[tuple[dict[str, Any], int | Code], ...] = (
    ({"response_format": {"type": "json_object"}}, 200),
    ({"response_format": {"type": "text"}}, 200),
    ({"response_format": {"type": "json_schema"}}, BAD),
    ({"response_format": {"type": "yaml"}}, CANNOT),
    ({"guided_json": '{"type": "integer"}'}, 200),
    ({"guided_grammar": 'root ::= "a" | "b"'}, 200),
    ({"guided_choice": ["a", "b"]}, 200),
    ({"structured_outputs": {"regex": "[ab]"}}, 200),
    ({"structured_outputs": {"json_object": True}}, 200),
    ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, MIXED),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "a"},
                        {"type": "or", "elements": [{"type": "regex", "pattern": "b"}, {"type": "any_text"}]},
                        {"type": "tag", "begin": "<x>", "content": {"type": "any_text"}, "end": "</x>"},
                        {"type": "grammar", "grammar": 'root ::= "c"'},
                    ],
                },
            }
        },
        200,
    ),
    ({"response_format": {"type": "structural_tag", "format": {"type": "poem"}}}, GRAMMAR),
    ({"response_format": {"type": "structural_tag", "format": {"type": "sequence", "elements": []}}}, GRAMMAR),
    ({"response_format": {"type": "structural_tag", "format": {"type": "tag"}}}, GRAMMAR),
)
OTHERS: tuple[Seldom, ...] = (
    (GENERATE, {"input_ids": [99_999]}, BAD),
    (GENERATE, {"text": "x", "sampling_params": {"temperature": -1}}, BAD),
    (GENERATE, {"text": "x" * 200_000}, Cause.CONTEXT_LENGTH_EXCEEDED),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, CANNOT),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 1, "best_of": 1, "echo": False}, 200),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "stream_options": {"include_usage": True}}, BAD),
    (MESSAGES, {"messages": [USER]}, BAD),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, CANNOT),
    (
        MESSAGES,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Well.", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "rest", "input": {}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "2"}]},
            ],
            "system": [{"type": "text", "text": "Be brief."}],
            "max_tokens": 1,
            "tools": [TOOL],
            "tool_choice": {"type": "none"},
        },
        200,
    ),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "thinking": {"type": "disabled"}}, 200),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "tool_choice": {"type": "some"}}, BAD),
    (COUNT, {"messages": [USER], "tools": [TOOL]}, 200),
    (
        RESPONSES,
        {
            "input": [
                USER,
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Well."}]},
                {"type": "function_call", "call_id": "c", "name": "rest", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "2"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                USER,
            ],
            "tools": [FLAT],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "rest"}]},
            "max_output_tokens": 1,
            "store": False,
        },
        200,
    ),
    (RESPONSES, {"input": [{"type": "file_search_call"}]}, CANNOT),
    (RESPONSES, {"input": "x", "background": True}, CANNOT),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "poem"}}}, BAD),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_none"}, Problem.PREVIOUS_RESPONSE_NOT_FOUND),
)
OF_VECTORS: tuple[Seldom, ...] = (
    (EMBEDDINGS, {"input": "How many?"}, 200),
    (EMBEDDINGS, {"input": ["a", "b"], "encoding_format": "base64"}, 200),
    (EMBEDDINGS, {"input": []}, BAD),
    (EMBEDDINGS, {"input": [99_999]}, BAD),
    (EMBEDDINGS, {"input": "x", "messages": [USER]}, CANNOT),
    (RERANK, {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}, 200),
    (RERANK, {"query": "a"}, BAD),
    (SCORE, {"text_1": "a", "text_2": ["b", "c"]}, 200),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["b", "c"]}, 200),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["b", "c", "d"]}, BAD),
)


def of_tokens(*, takes_forms: bool, has_priorities: bool) -> Iterator[Seldom]:
    """Of who makes tokens."""
    for more, right in (*OF_CHATS, *(OF_FORMS if takes_forms else ())):
        counts = has_priorities and "priority" in more
        yield CHAT, {"messages": [USER], "max_tokens": 1, "temperature": 0, **more}, 200 if counts else right
    yield from OTHERS
