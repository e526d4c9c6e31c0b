"""What a body says of the form of its answer, in the words of OpenAI, SGLang and vLLM: one grammar, or none.

Both halves of a pair read the same body and come to the same grammar, or to the same refusal: what does not compile
is a 400 that names the field and the place, before anything is reserved. Compiling leaves the event loop.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple  # JSON schemas

import msgspec

from tandem import grammar
from tandem.grammar import GrammarError
from tandem.logtext import shown
from tandem.server.api.body import OpenAIBody, SamplingFields, StructuredOutputs, unsupported
from tandem.server.api.bounds import LOOP_BYTES, MAX_GRAMMAR_CHARS
from tandem.server.api.errors import Problem, Refusal, contradiction, invalid
from tandem.server.api.off_loop import off_loop
from tandem.server.api.structural_tag import structural_tag
from tandem.server.api.tokenizer import Tokenizer

ANY_OBJECT = {"type": "object"}
NO_SPACES = ""
MOST_PLACES = 64  # subschemas that are looked at to say where a schema is wrong

encode = msgspec.json.Encoder().encode


class Constraint(NamedTuple):
    """One field that bounds the form of the answer."""

    param: str
    make: Callable[[Tokenizer], str]  # the grammar; raises GrammarError
    schema: Any = None  # to find the place that is wrong
    is_slow: bool = False  # to make: a converter in Python reads all of it


async def read_grammar(fields: SamplingFields, tokenizer: Tokenizer, prefix: str = "", *, size: int) -> str:
    """The grammar that the answer has to follow; empty when it is free. size: bytes of the body. Raises `Refusal`."""
    constraints = await off_loop(size, LOOP_BYTES, lambda: list(constraints_of(fields)))
    if not constraints:
        return ""
    if len(constraints) > 1:
        raise contradiction(
            prefix + constraints[1].param, f"contradicts {prefix}{constraints[0].param}: give one of them"
        )
    constraint = constraints[0]
    param = prefix + constraint.param
    try:
        made = await asyncio.to_thread(constraint.make, tokenizer) if constraint.is_slow else constraint.make(tokenizer)
    except GrammarError as error:
        raise wrong(param, grammar.in_one_line(str(error))) from None
    await check_grammar(made, tokenizer, param, constraint.schema)
    return made


async def check_grammar(made: str, tokenizer: Tokenizer, param: str, schema: Any = None) -> None:
    """Raises `Refusal` for one that does not compile, or is too large."""
    if len(made) > 2 * MAX_GRAMMAR_CHARS:
        raise wrong(param, f"makes a grammar of {len(made)} characters; at most {2 * MAX_GRAMMAR_CHARS} are accepted")
    try:
        vocabulary = tokenizer.opened_vocabulary or await asyncio.to_thread(tokenizer.open_vocabulary)
    except GrammarError as error:
        raise unsupported(param, f": {error}") from None
    try:
        if vocabulary.is_compiled(made):
            vocabulary.check(made)
        else:
            await asyncio.to_thread(vocabulary.check, made)
    except GrammarError as error:
        place = "" if schema is None else await asyncio.to_thread(place_of, schema, str(error), vocabulary)
        raise wrong(param, f"{place}{error}") from None


def wrong(param: str, message: str) -> Refusal:
    """Of a text in a language of its own, which no schema can describe."""
    return Refusal(Problem.INVALID_GRAMMAR, f"{param}: {message}", param=param)


def constraints_of(fields: SamplingFields) -> Iterator[Constraint]:
    """Blank texts ask for nothing: gateways send them."""
    if fields.regex:
        yield regex_constraint("regex", fields.regex)
    if fields.ebnf:
        yield ebnf_constraint("ebnf", fields.ebnf)
    if fields.json_schema not in (None, ""):
        yield schema_constraint("json_schema", fields.json_schema)
    if fields.structural_tag not in (None, "", {}):
        yield tag_constraint("structural_tag", fields.structural_tag)
    if isinstance(fields, OpenAIBody):
        yield from format_constraints(fields.response_format or {})
        older, newer = guided(fields), fields.structured_outputs
        yield from vllm_constraints(older, "guided_")
        if newer is not None and not are_same(older, newer):  # clients of any vLLM say the same in both ways
            yield from vllm_constraints(newer, "structured_outputs.")


def are_same(one: StructuredOutputs, other: StructuredOutputs) -> bool:
    try:
        return encode(one) == encode(other)
    except RecursionError:  # of a schema that is refused for its depth
        return False


def format_constraints(format: dict[str, Any]) -> Iterator[Constraint]:
    """OpenAI's `response_format`, and the schema beside `json_object` that llama.cpp and Together AI read. TGI calls it
    `value`, and Hugging Face's client makes that of every `json_schema`."""
    match format.get("type", "text"):
        case "text":
            return
        case "json_object":
            yield schema_constraint("response_format", format.get("value") or format.get("schema") or ANY_OBJECT)
        case "json_schema":
            named = format.get("json_schema")
            if not isinstance(named, dict):
                raise invalid("response_format", "json_schema must be an object with a schema")
            schema = named.get("schema")
            is_lenient = named.get("strict") is False
            yield schema_constraint("response_format", ANY_OBJECT if schema is None else schema, is_lenient=is_lenient)
        case "structural_tag":
            yield tag_constraint("response_format", format)
        case kind:
            raise unsupported("response_format", f" with type {shown(kind)}")


def vllm_constraints(outputs: StructuredOutputs, prefix: str) -> Iterator[Constraint]:
    """What vLLM's `structured_outputs` says, or its older `guided_*`: the same kinds under another prefix."""
    spaces = NO_SPACES if outputs.disable_any_whitespace else whitespace(outputs.whitespace_pattern)
    if outputs.json not in (None, ""):
        yield schema_constraint(prefix + "json", outputs.json, spaces=spaces)
    if outputs.json_object:
        yield schema_constraint(prefix + "json_object", ANY_OBJECT, spaces=spaces)
    if outputs.regex:
        yield regex_constraint(prefix + "regex", outputs.regex)
    if outputs.choice:
        yield choice_constraint(prefix + "choice", outputs.choice)
    if outputs.grammar:
        yield ebnf_constraint(prefix + "grammar", outputs.grammar)
    if outputs.structural_tag not in (None, "", {}):
        yield tag_constraint(prefix + "structural_tag", outputs.structural_tag)


def guided(body: OpenAIBody) -> StructuredOutputs:
    """vLLM's fields of one kind each as the one for all kinds."""
    return StructuredOutputs(
        json=body.guided_json,
        json_object=body.guided_json_object,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
        whitespace_pattern=body.guided_whitespace_pattern,
    )


def whitespace(pattern: str | None) -> str:
    return grammar.WHITESPACE if pattern is None else pattern


# one kind each


def schema_constraint(
    param: str, schema: Any, *, is_lenient: bool = False, spaces: str = grammar.WHITESPACE
) -> Constraint:
    if isinstance(schema, str):
        schema = parsed(param, schema)
    if not isinstance(schema, dict | bool):
        raise wrong(param, f"a JSON schema is an object, not {type(schema).__name__}")
    check_size(param, schema)
    return Constraint(
        param, lambda _: grammar.from_json_schema(schema, is_lenient=is_lenient, whitespace=spaces), schema=schema
    )


def regex_constraint(param: str, regex: str) -> Constraint:
    return Constraint(param, lambda _: grammar.from_regex(regex))


def ebnf_constraint(param: str, text: str) -> Constraint:
    return Constraint(param, lambda _: grammar.from_ebnf(text), is_slow=True)


def choice_constraint(param: str, choices: list[str]) -> Constraint:
    check_size(param, choices)
    return Constraint(param, lambda _: grammar.from_lark("start: " + " | ".join(map(grammar.quoted, choices))))


def tag_constraint(param: str, value: Any) -> Constraint:
    tag = parsed(param, value) if isinstance(value, str) else value
    if not isinstance(tag, dict):
        raise wrong(param, f"must be an object, not {type(tag).__name__}")
    check_size(param, tag)
    return Constraint(param, lambda tokenizer: structural_tag(tag, tokenizer.grammar_marks), is_slow=True)


def parsed(param: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise wrong(param, f"is not valid JSON: {error}") from None


def check_size(param: str, value: Any) -> None:
    """The converters recurse; and what is encoded here is decoded again by every worker."""
    try:
        size = len(msgspec.json.encode(value))
    except (RecursionError, ValueError) as error:
        raise wrong(param, f"nested too deep: {error}") from None
    if size > MAX_GRAMMAR_CHARS:
        raise wrong(param, f"has {size} characters as JSON; at most {MAX_GRAMMAR_CHARS} are accepted")
    if is_deeper(value, grammar.MOST_NESTED):
        raise wrong(param, f"is nested deeper than {grammar.MOST_NESTED}")


def is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [inner for outer in level for inner in inside(outer)]
        if not level:
            return False
    return True


def inside(value: Any) -> list[Any]:
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in found if isinstance(inner, dict | list)]


def place_of(schema: Any, message: str, vocabulary: grammar.Vocabulary) -> str:
    """`at /properties/age: ` for the smallest subschema that is wrong by itself in the same way; else empty."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    left = MOST_PLACES
    place, here = "", schema
    while True:
        found = None
        for key, inner in children(here):
            left -= 1
            if left < 0:
                break
            if isinstance(inner, dict) and complaint({**shared, **inner}, vocabulary) == message:
                found = key, inner
                break
        if found is None:
            return f"at {place}: " if place else ""
        place, here = place + found[0], found[1]


def children(schema: Any) -> Iterator[tuple[str, Any]]:
    """Subschemas with the way to them, as a JSON pointer."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        at = "/" + pointer(key)
        if isinstance(value, list):
            yield from ((f"{at}/{index}", inner) for index, inner in enumerate(value))
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            yield from ((f"{at}/{pointer(name)}", inner) for name, inner in value.items())
        elif isinstance(value, dict):
            yield at, value


def pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def complaint(schema: dict[str, Any], vocabulary: grammar.Vocabulary) -> str:
    try:
        return vocabulary.complaint(grammar.from_json_schema(schema))
    except GrammarError as error:
        return str(error)
