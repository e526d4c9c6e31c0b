"""Fields by which some server bounds or shapes its output, under any of their names.

To ignore one would answer something else than was asked for. So every body of generation has all of them: the ones that
its endpoint reads it declares anew with their type, the others are raw JSON here, and refused when they ask for
something (`body.refuse_unsupported`), with the name that this has on that endpoint. A value that changes nothing
asks for nothing: programs fill in defaults.
"""

from functools import cache
from typing import Any  # the default of a field, as msgspec types it; a value of JSON

import msgspec
from msgspec import Raw, Struct

NULL = Raw(b"null")
NOTHING: Any = msgspec.field(default_factory=lambda: NULL)  # a raw field that was not sent
MOST_IDLE_BYTES = 64  # of what asks for nothing, with any spaces in it
IDLE: tuple[object, ...] = (None, False, "", [], {})


class Foreign(Struct, kw_only=True):
    # how long an answer is, and what may stand in its prompt
    max_tokens: Raw = NOTHING
    max_completion_tokens: Raw = NOTHING
    max_new_tokens: Raw = NOTHING
    max_output_tokens: Raw = NOTHING
    max_tokens_to_sample: Raw = NOTHING
    max_gen_len: Raw = NOTHING
    max_length: Raw = NOTHING
    maxTokens: Raw = NOTHING
    maxOutputTokens: Raw = NOTHING
    num_predict: Raw = NOTHING
    n_predict: Raw = NOTHING
    min_tokens: Raw = NOTHING
    min_new_tokens: Raw = NOTHING
    min_length: Raw = NOTHING
    truncate_prompt_tokens: Raw = NOTHING
    truncate: Raw = NOTHING
    num_ctx: Raw = NOTHING
    max_time: Raw = NOTHING
    t_max_predict_ms: Raw = NOTHING
    # where it ends
    stop: Raw = NOTHING
    stop_sequences: Raw = NOTHING
    stop_strings: Raw = NOTHING
    stop_words: Raw = NOTHING
    stopSequences: Raw = NOTHING
    stop_regex: Raw = NOTHING
    stop_token_ids: Raw = NOTHING
    ignore_eos: Raw = NOTHING
    early_stopping: Raw = NOTHING
    repetition_detection: Raw = NOTHING
    # how it is sampled
    temperature: Raw = NOTHING
    top_p: Raw = NOTHING
    top_k: Raw = NOTHING
    min_p: Raw = NOTHING
    top_a: Raw = NOTHING
    top_n_sigma: Raw = NOTHING
    typical_p: Raw = NOTHING
    tfs_z: Raw = NOTHING
    epsilon_cutoff: Raw = NOTHING
    eta_cutoff: Raw = NOTHING
    dynatemp_range: Raw = NOTHING
    samplers: Raw = NOTHING
    mirostat: Raw = NOTHING
    xtc_probability: Raw = NOTHING
    dry_multiplier: Raw = NOTHING
    no_repeat_ngram_size: Raw = NOTHING
    presence_penalty: Raw = NOTHING
    frequency_penalty: Raw = NOTHING
    repetition_penalty: Raw = NOTHING
    repeat_penalty: Raw = NOTHING
    length_penalty: Raw = NOTHING
    penalty_alpha: Raw = NOTHING
    guidance_scale: Raw = NOTHING
    logit_bias: Raw = NOTHING
    logits_processors: Raw = NOTHING
    allowed_token_ids: Raw = NOTHING
    bad_words: Raw = NOTHING
    bad_words_ids: Raw = NOTHING
    force_words_ids: Raw = NOTHING
    suppress_tokens: Raw = NOTHING
    do_sample: Raw = NOTHING
    seed: Raw = NOTHING
    sampling_seed: Raw = NOTHING
    random_seed: Raw = NOTHING
    n: Raw = NOTHING
    best_of: Raw = NOTHING
    n_cmpl: Raw = NOTHING
    num_return_sequences: Raw = NOTHING
    num_beams: Raw = NOTHING
    beam_width: Raw = NOTHING
    use_beam_search: Raw = NOTHING
    vllm_xargs: Raw = NOTHING
    watermarking: Raw = NOTHING
    # its form
    suffix: Raw = NOTHING
    grammar: Raw = NOTHING
    regex: Raw = NOTHING
    ebnf: Raw = NOTHING
    json_schema: Raw = NOTHING
    structural_tag: Raw = NOTHING
    format: Raw = NOTHING
    response_format: Raw = NOTHING
    structured_outputs: Raw = NOTHING
    guided_json: Raw = NOTHING
    guided_regex: Raw = NOTHING
    guided_choice: Raw = NOTHING
    guided_grammar: Raw = NOTHING
    guided_json_object: Raw = NOTHING
    tools: Raw = NOTHING
    functions: Raw = NOTHING
    # how much is thought, and said
    think: Raw = NOTHING
    thinking: Raw = NOTHING
    enable_thinking: Raw = NOTHING
    thinking_budget: Raw = NOTHING
    thinking_token_budget: Raw = NOTHING
    reasoning: Raw = NOTHING
    reasoning_budget: Raw = NOTHING
    reasoning_effort: Raw = NOTHING
    verbosity: Raw = NOTHING
    # where such fields stand elsewhere
    options: Raw = NOTHING
    extra_body: Raw = NOTHING
    sampling_params: Raw = NOTHING
    parameters: Raw = NOTHING
    generation_config: Raw = NOTHING
    generationConfig: Raw = NOTHING
    nvext: Raw = NOTHING


# What changes nothing, beside null. Of the names here `false` may ask for something.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("n", "best_of", "n_cmpl", "num_return_sequences", "num_beams", "beam_width", "top_p"), (1,)),
    **dict.fromkeys(("typical_p", "tfs_z", "repetition_penalty", "repeat_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("top_a", "min_p", "mirostat", "xtc_probability", "dry_multiplier", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens", "min_new_tokens", "min_length"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "dynatemp_range", "penalty_alpha", "top_logprobs"), (0,)),
    **dict.fromkeys(("top_k", "top_n_sigma"), (-1, 0)),
    "guidance_scale": (1,),
    "reasoning_budget": (-1,),
    "do_sample": (True,),
    **dict.fromkeys(("think", "enable_thinking"), ()),
    "verbosity": ("medium",),
}
# Of each line the first name that an endpoint reads is the one it is told by.
SYNONYMS: tuple[tuple[str, ...], ...] = (
    (
        *("max_tokens", "max_new_tokens", "max_output_tokens", "max_completion_tokens", "max_tokens_to_sample"),
        *("max_length", "num_predict", "n_predict", "max_gen_len", "maxTokens", "maxOutputTokens"),
    ),
    ("min_tokens", "min_new_tokens", "min_length"),
    ("stop", "stop_sequences", "stop_strings", "stop_words", "stopSequences"),
    ("n", "n_cmpl", "num_return_sequences"),
    ("seed", "sampling_seed", "random_seed"),
    ("repetition_penalty", "repeat_penalty"),
    ("response_format", "text", "output_config", "json_schema", "format"),
    ("guided_grammar", "ebnf", "grammar"),
    ("guided_regex", "regex"),
    ("chat_template_kwargs", "thinking", "enable_thinking", "think"),
    ("tools", "functions"),
    ("return_token_ids", "return_prompt_token_ids"),
)


def idle_values(name: str) -> tuple[object, ...]:
    """All that may stand in this field, where it is read by nobody."""
    return (None, *NEUTRAL[name]) if name in NEUTRAL else IDLE


def is_asked_for(name: str, value: Raw) -> bool:
    raw = bytes(value)
    if len(raw) > MOST_IDLE_BYTES:
        return True
    try:
        given = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # a number beyond all bounds, bytes that are no text
        return True
    is_flag = isinstance(given, bool)
    return not any(given == idle and is_flag == isinstance(idle, bool) for idle in idle_values(name))


@cache
def handled(kind: type[Struct]) -> frozenset[str]:
    """The fields that some code reads."""
    return frozenset(field.name for field in msgspec.structs.fields(kind) if field.type is not Raw)


def name_here(name: str, handled: frozenset[str]) -> str | None:
    """What a field of others is called where these fields are read; None: it has no name there."""
    names = next((line for line in SYNONYMS if name in line), (name,))
    return next((other for other in names if other in handled), None)
