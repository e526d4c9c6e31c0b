"""Bodies as they come in: names, types and bounds (`bounds.py`), nothing checked beyond them.

Every field may be null, because gateways fill in nulls; unknown fields are ignored. A field that would change the
answer and that this server cannot honour is declared as raw JSON, and refused when it asks for something; those of all
endpoints stand in `foreign_fields.py`. Of a field that comes twice the last one counts, on both halves and in the
router alike.
"""
# pyright: reportIncompatibleVariableOverride=false
# A body declares anew what it reads of `Foreign`: raw there, of its own type here.

import re
from typing import Annotated, Any, Literal, TypeVar  # messages are the template's business, whatever they hold

import msgspec
from msgspec import Meta, Raw, Struct

from tandem.core.values import MAX_RENDERED_AT
from tandem.server.api.bounds import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TOOLS,
    Choices,
    Dimensions,
    GrammarText,
    Int,
    LogitBias,
    LogprobIds,
    MinP,
    MinTokens,
    NewTokens,
    Penalty,
    Rank,
    RepetitionPenalty,
    Salt,
    Samples,
    Seconds,
    Stop,
    Stops,
    StopTokenIds,
    Temperature,
    TokenId,
    TokensOrNone,
    TopK,
    TopLogprobs,
    TopN,
    TopP,
)
from tandem.server.api.errors import Problem, Refusal, contradiction
from tandem.server.api.foreign_fields import NOTHING, NULL, Foreign, handled, is_asked_for, name_here

NOT_JSON = (msgspec.DecodeError, ValueError, RecursionError)  # not UTF-8; nested beyond what can be read

# Of what ends with its prompts, under every name that clients know: OpenAI's, Jina's and Cohere's, vLLM's.
EMBEDDING_PATHS = ("/v1/embeddings",)
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")
VECTOR_PATHS = (*EMBEDDING_PATHS, *RERANK_PATHS, *SCORE_PATHS)
# vLLM's and SGLang's
TOKENIZE_PATHS = ("/tokenize", "/v1/tokenize")
DETOKENIZE_PATHS = ("/detokenize", "/v1/detokenize")

Schema = GrammarText | dict[str, Any]  # a JSON schema, as text or as it is
Messages = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class Routing(Struct, kw_only=True):
    """The fields that all generation endpoints share, read from the same body beside the endpoint's own."""

    model: str | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    priority: Int | None = None
    timeout: Seconds | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: Int | list[Int | None] | None = None
    bootstrap_room: Int | str | list[Int | str | None] | None = None
    routed_dp_rank: Rank | list[Rank | None] | None = None
    data_parallel_rank: Rank | list[Rank | None] | None = None  # deprecated name of routed_dp_rank
    disagg_prefill_dp_rank: Rank | list[Rank | None] | None = None
    rendered_at: Annotated[int, Meta(ge=1, le=MAX_RENDERED_AT)] | None = None  # Unix seconds, for the chat template
    lora_path: Raw = NOTHING
    lora_request: Raw = NOTHING
    lora_name: Raw = NOTHING
    lora: Raw = NOTHING
    loras: Raw = NOTHING
    adapter_id: Raw = NOTHING
    session_params: Raw = NOTHING
    return_hidden_states: Raw = NOTHING
    return_routed_experts: Raw = NOTHING
    custom_logit_processor: Raw = NOTHING


class SamplingFields(Foreign, kw_only=True):
    """How to sample, as both dialects name it; the names that differ are mapped by the endpoint."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    n: Samples | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    json_schema: Schema | None = None
    structural_tag: Schema | None = None


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's `structured_outputs`."""

    json: Schema | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: Schema | None = None
    whitespace_pattern: GrammarText | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Raw = NOTHING


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(SamplingFields, kw_only=True):
    """What chat and completions share."""

    max_tokens: NewTokens | None = None
    min_tokens: MinTokens | None = None
    seed: Int | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    best_of: Samples | None = None
    prompt_logprobs: TopLogprobs | None = None
    logprob_token_ids: Raw = NOTHING
    return_prompt_token_ids: Raw = NOTHING
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: GrammarText | None = None


class ChatBody(OpenAIBody, kw_only=True):
    messages: Messages | None = None
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[str] | None = None
    audio: Raw = NOTHING
    web_search_options: Raw = NOTHING
    chat_template: Raw = NOTHING
    documents: Raw = NOTHING
    input_ids: Raw = NOTHING
    echo: Raw = NOTHING
    add_special_tokens: Raw = NOTHING
    return_prompt_text: Raw = NOTHING
    return_meta_info: Raw = NOTHING


class CompletionBody(OpenAIBody, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    max_tokens: TokensOrNone | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: Raw = NOTHING


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: TokensOrNone | None = None
    min_new_tokens: MinTokens | None = None
    sampling_seed: Int | None = None


class NativeBody(Foreign, kw_only=True):
    """SGLang's own dialect, `/generate`."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Meta(max_length=MAX_PROMPTS)] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Int | list[Int] | None = None
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    return_text_in_logprobs: bool | None = None
    token_ids_logprob: Annotated[list[TokenId | LogprobIds], Meta(max_length=MAX_PROMPTS)] | None = None
    input_embeds: Raw = NOTHING
    image_data: Raw = NOTHING
    video_data: Raw = NOTHING
    audio_data: Raw = NOTHING
    background: Raw = NOTHING
    return_bytes: Raw = NOTHING
    return_entropy: Raw = NOTHING
    return_sampling_mask: Raw = NOTHING
    return_indexer_topk: Raw = NOTHING
    require_reasoning: Raw = NOTHING
    return_prompt_token_ids: Raw = NOTHING
    positional_embed_overrides: Raw = NOTHING


class VectorBody(Struct, kw_only=True):
    """What all requests that end with their prompts share."""

    truncate_prompt_tokens: Raw = NOTHING
    truncate: Raw = NOTHING
    max_tokens_per_doc: Raw = NOTHING


class EmbeddingBody(VectorBody, kw_only=True):
    """OpenAI's `/v1/embeddings`."""

    input: str | list[str | TokenId | list[TokenId]] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None  # only true: vectors are
    messages: Raw = NOTHING


class Document(Struct):
    text: str


class RerankBody(VectorBody, kw_only=True):
    """`/v1/rerank`, as Jina and Cohere have it, and after them vLLM and SGLang."""

    query: str | None = None
    documents: Annotated[list[str | Document], Meta(max_length=MAX_PROMPTS)] | None = None
    top_n: TopN | None = None
    return_documents: bool | None = None
    instruct: Raw = NOTHING
    rank_fields: Raw = NOTHING


class ScoreBody(VectorBody, kw_only=True):
    """`/v1/score`, vLLM's: one text with one or several, or as many pairs as there are of either."""

    text_1: str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)] | None = None
    text_2: str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)] | None = None


class TokenizeBody(Struct):
    """`prompt` (or `text`) is text; `messages`, with all that their chat template is shown, are a chat."""

    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    rendered_at: Annotated[int, Meta(ge=1, le=MAX_RENDERED_AT)] | None = None
    chat_template: Raw = NOTHING
    documents: Raw = NOTHING

    @property
    def chat(self) -> ChatBody:
        """Whose prompt it is."""
        return ChatBody(
            messages=self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            reasoning_effort=self.reasoning_effort,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeBody(Struct):
    tokens: list[TokenId | list[TokenId]] | None = None
    skip_special_tokens: bool | None = None


AnyBody = TypeVar("AnyBody", bound=Struct)


class AbortBody(Struct):
    """Of `/abort_request`, on servers and router alike."""

    rid: str | None = None
    abort_all: bool | None = None


def decode_body(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    """The body as a struct; `Refusal` for what is not JSON, not an object, of a wrong type, or not supported."""
    try:
        body = decode_numbers(raw, kind)
    except msgspec.ValidationError as error:
        what, _, _ = str(error).partition(" - at ")
        param = param_of(str(error))
        if param is None and what.startswith("Expected `object`, got "):  # the body itself
            raise Refusal(Problem.INVALID_JSON, "the body must be a JSON object") from None
        raise Refusal(Problem.INVALID_VALUE, f"{param}: {what}" if param else str(error), param=param) from None
    except NOT_JSON as error:
        raise Refusal(Problem.INVALID_JSON, f"the body is not valid JSON: {error}") from None
    refuse_unsupported(body)
    return body


def decode_numbers(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    """`2.0` is an integer too, as JSON schemas have it; a body that writes one so is looked at twice."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        body = msgspec.json.encode(with_integers(msgspec.json.decode(raw)))
    return msgspec.json.decode(body, type=kind)


def with_integers(value: Any) -> Any:
    """Of JSON: each whole number as an integer."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [with_integers(item) for item in value]
        case dict():
            return {name: with_integers(item) for name, item in value.items()}
        case _:
            return value


def refuse_unsupported(body: Struct, prefix: str = "") -> None:
    """Refuse what was asked for in a field that is declared as raw JSON: such fields can only be empty here."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Raw) and value is not NULL and is_asked_for(name, value):
            raise unsupported(prefix + name, hint(body, name))
        if isinstance(value, Struct):
            refuse_unsupported(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Struct):
            for inner in value:
                refuse_unsupported(inner, f"{prefix}{name}.")


def hint(body: Struct, name: str) -> str:
    """What a field of another server's, which would bound or shape the output, is called here."""
    other = name_here(name, handled(type(body)))
    if isinstance(body, NativeBody) and (inner := name_here(name, handled(NativeSampling))) is not None:
        other = f"sampling_params.{inner}"
    return "" if other is None else f": here it is {other}"


def unsupported(param: str, detail: str = "") -> Refusal:
    return Refusal(Problem.UNSUPPORTED, f"{param} is not supported by this server{detail}", param=param)


def param_of(message: str) -> str | None:
    """The field that msgspec complains of: `... - at `$.stop[0]`` gives `stop`, and so does `at `key` in `$.stop``."""
    found = re.search(r" - at (?:`key` in )?`\$\.([\w.]+)", message)
    return found.group(1) if found else None


def per_prompt(value: Any, count: int, param: str) -> list[Any]:  # a scalar or a list of anything
    """One value per prompt from a scalar or a list of `count`."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise contradiction(param, f"a list of {len(value)} for {count} prompts")
    return value
