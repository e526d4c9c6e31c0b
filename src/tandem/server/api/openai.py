"""OpenAI's dialect, in: bodies of chat and text completions become prompts and parameters, or a `Refusal`.

Out: `openai_reply.py`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any  # messages and template variables are whatever the template takes

from msgspec import structs

from tandem.server.api.body import ChatBody, CompletionBody, OpenAIBody, Routing, unsupported
from tandem.server.api.bounds import LOOP_BYTES, LOOP_CHAT_BYTES, LOOP_SAMPLES, MAX_PROMPTS
from tandem.server.api.chat_form import AnswerForm, flat_message
from tandem.server.api.errors import contradiction, invalid
from tandem.server.api.limits import ModelLimits
from tandem.server.api.off_loop import in_turns, off_loop
from tandem.server.api.sample_requests import time_of
from tandem.server.api.served_model import ServedModel
from tandem.server.api.structured_output import read_grammar
from tandem.server.api.tokenizer import RenderedChat, Tokenizer
from tandem.server.api.validation import (
    Asked,
    GenerationParams,
    Names,
    Prompt,
    check_params,
    check_prompt,
    check_prompts,
    read_text,
)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


async def read_chat(
    body: ChatBody,
    routing: Routing,
    served: ServedModel,
    size: int,
    *,
    param: str = "messages",
) -> Asked:
    """The one prompt of a chat request. size: bytes of the body. param: what its conversation is called."""
    limits, tokenizer = served.limits, served.tokenizer
    answer, chat = await off_loop(size, LOOP_CHAT_BYTES, rendered, body, routing, served)
    params = openai_params(
        body,
        limits,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_name="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await answer.read_grammar(body, tokenizer, chat.text, size),
    )
    params = structs.replace(params, thinking=answer.thinking(chat.text))
    if answer.shows_special_tokens(tokenizer):
        params = structs.replace(params, skip_special_tokens=False)
    prompt = await read_text(chat.text, served, param, add_special_tokens=False)
    prompt = structs.replace(prompt, rendered_at=chat.rendered_at)
    return [check_prompt(prompt, limits, param)], [params]


async def count_tokens(
    read: Callable[[], ChatBody],
    routing: Routing,
    served: ServedModel,
    size: int,
    *,
    param: str = "messages",
) -> int:
    """Of the prompt that a chat makes. read: the chat, of a body of so many bytes, in any thread."""

    def text() -> str:
        chat = read()
        return chat_text(chat, served.tokenizer, time_of(routing), served.form.answer_to(chat).offered).text

    prompt = await off_loop(size, LOOP_CHAT_BYTES, text)
    return len((await read_text(prompt, served, param, add_special_tokens=False)).tokens)


def rendered(body: ChatBody, routing: Routing, served: ServedModel) -> tuple[AnswerForm, RenderedChat]:
    """In any thread: what must be right before there is a prompt, and its text."""
    refuse_options(body, routing)
    refuse_functions(body)
    answer = served.form.answer_to(body)
    if body.modalities not in (None, ["text"]):
        raise unsupported("modalities", "; it answers in text only")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    return answer, chat_text(body, served.tokenizer, time_of(routing), answer.offered)


async def read_completion(body: CompletionBody, routing: Routing, served: ServedModel, size: int) -> Asked:
    limits = served.limits
    refuse_options(body, routing)
    params = openai_params(
        body,
        limits,
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        max_name="max_tokens",
        top_logprobs=body.logprobs,
        echoes=bool(body.echo),
        grammar=await read_grammar(body, served.tokenizer, size=size),
    )
    adds_special = body.add_special_tokens is not False
    prompts: list[Prompt] = []
    async for item in in_turns(await off_loop(size, LOOP_BYTES, prompt_items, body.prompt), LOOP_SAMPLES):
        if isinstance(item, str):
            prompts.append(await read_text(item, served, "prompt", add_special_tokens=adds_special))
        else:
            prompts.append(Prompt(item))
    return await off_loop(size, LOOP_BYTES, check_prompts, prompts, limits, "prompt"), [params] * len(prompts)


def prompt_items(value: str | list[str | int | list[int]] | None, param: str = "prompt") -> list[str | list[int]]:
    """A text, texts, ids, or lists of ids: one item for each prompt."""
    if value is None or value == []:
        raise invalid(param, "is missing or empty")
    if isinstance(value, str):
        return [value]
    if all(isinstance(item, int) for item in value):
        return [value]  # type: ignore[list-item]  # just checked: all ints
    if len(value) > MAX_PROMPTS:
        raise invalid(param, f"at most {MAX_PROMPTS} prompts in one request")
    items = [item for item in value if not isinstance(item, int)]
    if len(items) < len(value):
        raise invalid(param, "mixes texts, ids and lists")
    return items


def openai_params(
    body: OpenAIBody,
    limits: ModelLimits,
    *,
    max_tokens: int | None,
    max_name: str,
    top_logprobs: int | None,
    grammar: str,
    echoes: bool = False,  # the answer begins with the prompt, and tells of its tokens what it tells of others
) -> GenerationParams:
    echoed = top_logprobs if echoes else None
    wanted = [most for most in (echoed, body.prompt_logprobs) if most is not None]
    return check_params(
        body,
        limits,
        Names(max_tokens=max_name),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        seed=body.seed,
        top_logprobs=top_logprobs,
        prompt_logprobs_from=0 if wanted else None,
        prompt_top_logprobs=max(wanted, default=0),
        keeps_stop=bool(body.no_stop_trim or body.include_stop_str_in_output),
        grammar=grammar,
    )


def refuse_options(body: OpenAIBody, routing: Routing) -> None:
    if body.stream_options is not None and not routing.stream:
        raise invalid("stream_options", "needs stream: true")
    if body.prompt_logprobs is not None and routing.stream:
        raise invalid("prompt_logprobs", "are told in whole answers only: leave stream out, or use echo with logprobs")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise contradiction("best_of", "must equal n: no more samples are made than are shown")


def refuse_functions(body: ChatBody) -> None:
    """Functions themselves are refused where the body is decoded; here is a choice among none."""
    if body.function_call not in (None, "none", "auto"):
        raise invalid("function_call", "needs functions, which this server does not support; use tools")


def chat_text(
    body: ChatBody, tokenizer: Tokenizer, rendered_at: int, tools: Sequence[dict[str, Any]] = ()
) -> RenderedChat:
    """The conversation as text. An unfinished last message of the assistant may be continued instead of answered."""
    if not body.messages:
        raise invalid("messages", "is missing or empty")
    messages = [flat_message(message) for message in body.messages]
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables = variables_of(body.reasoning_effort) | variables
    for reserved in ("messages", "add_generation_prompt"):
        if reserved in variables:
            raise invalid("chat_template_kwargs", f"must not set {reserved}")
    if tools:
        variables["tools"] = list(tools)
        if tokenizer.reads_functions_of_messages:
            messages = with_functions(messages, [tool["function"] for tool in tools])
    if not body.continue_final_message:
        adds_prompt = body.add_generation_prompt is not False
        return tokenizer.render_chat(
            messages, add_generation_prompt=adds_prompt, variables=variables, rendered_at=rendered_at
        )
    last = messages[-1]
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or has_more_than_text(last):
        raise contradiction("continue_final_message", "the last message must be the assistant's, with text only")
    before = tokenizer.render_chat(
        messages[:-1], add_generation_prompt=True, variables=variables, rendered_at=rendered_at
    )
    return before._replace(text=before.text + last["content"])


def with_functions(messages: list[dict[str, Any]], functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the system message, which there is then, as text; one that has some keeps them."""
    first, rest = messages[0], messages[1:]
    if first["role"] not in ("system", "developer"):
        first, rest = {"role": "system", "content": ""}, messages
    return [{"tools": json.dumps(functions, ensure_ascii=False), **first}, *rest]


def has_more_than_text(message: Mapping[str, Any]) -> bool:
    """Such a message cannot be gone on with: only its text would be in the prompt."""
    return any(message.get(name) for name in ("tool_calls", "reasoning_content"))


def variables_of(effort: str) -> dict[str, Any]:
    """By which templates know it: some have efforts, others only whether there is thinking, by one of two names."""
    return {"reasoning_effort": effort, **dict.fromkeys(("enable_thinking", "thinking"), effort != "none")}
