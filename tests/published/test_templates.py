"""Chat templates that are published: a conversation becomes the text that transformers makes of it, or is refused."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tandem.cli.model_source import BUNDLED, find_model
from tandem.server.api.chat_form import flat_message
from tandem.server.api.errors import Refusal
from tandem.server.api.tokenizer import Tokenizer

pytestmark = pytest.mark.slow  # and by `make published` only
Messages = list[dict[str, Any]]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Today's.", "parameters": PARAMETERS}}]
QUESTION: Messages = [{"role": "user", "content": "How is Paris?"}]
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "22 degrees"}
TURNS: Messages = [
    {"role": "system", "content": "Be brief."},
    *QUESTION,
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "And Rome?"},
]
CONVERSATIONS: dict[str, tuple[Messages, list[dict[str, Any]] | None]] = {
    "question": (QUESTION, None),
    "turns": (TURNS, None),
    "tools": (QUESTION, TOOLS),
    "result": ([*QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT], TOOLS),
}
REFUSED = 30  # of 280 at most: they want other variables, or roles in another order


def as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments travel as text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def ours(tokenizer: Tokenizer, messages: Messages, tools: Sequence[Any] | None) -> str | None:
    sent = [flat_message(as_sent(message)) for message in messages]
    variables = {"tools": tools} if tools else {}
    try:
        now = int(time.time())
        return tokenizer.render_chat(sent, add_generation_prompt=True, variables=variables, rendered_at=now).text
    except Refusal:
        return None


def theirs(source: str, special: Mapping[str, str], messages: Messages, tools: list[Any] | None) -> str | None:
    how: dict[str, Any] = {"tools": tools, "chat_template": source, "add_generation_prompt": True, **special}
    try:
        texts, _ = render_jinja_template(conversations=[messages], **how)
    except Exception:  # whatever a template raises
        return None
    return texts[0]


def test_conversations_become_the_texts_that_transformers_makes_of_them(models_of_llama_cpp: Path) -> None:
    templates = sorted((models_of_llama_cpp / "templates").glob("*.jinja"))
    assert len(templates) > 60
    refused = 0
    for path in templates:
        tokenizer = Tokenizer(find_model(BUNDLED), template=path.read_text())
        for name, (messages, tools) in CONVERSATIONS.items():
            expected = theirs(path.read_text(), tokenizer.special_tokens, messages, tools)
            assert ours(tokenizer, messages, tools) == expected, f"{path.name}: {name}"
            refused += expected is None
    assert refused <= REFUSED
