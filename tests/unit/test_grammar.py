"""Grammars over the vocabulary of the bundled model: what may come next, when it is over, what does not compile."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import pytest
from api_fakes import load_tokenizer
from llguidance import LLMatcher, LLTokenizer

from tandem import grammar
from tandem.cli.model_source import BUNDLED as NAME
from tandem.cli.model_source import find_model
from tandem.grammar import GrammarError, Matcher, RememberingTokenizer, Vocabulary, look_ahead
from tandem.server.api.structural_tag import structural_tag
from tandem.server.api.tokenizer import Tokenizer

BUNDLED = find_model(NAME)
SIZE = 512
END = 2
HUNG_S = 60
X_OR_Y = {"type": "regex", "pattern": "x|y"}
MANY = {"type": "regex", "pattern": "b+"}


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(BUNDLED / "tokenizer.json", size=SIZE)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED)


def matcher(made: str, **options: bool) -> Matcher:
    return vocabulary().matcher(made, eos_ids=[END], **options)


def allowed(it: Matcher) -> set[int]:
    return ids_in(it.allowed())


def ids_in(words: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")).tolist())


def follow(it: Matcher, text: str) -> None:
    for token in tokenizer().encode(text):
        assert token in allowed(it), (text, token)
        it.accept(token)


def test_only_tokens_that_the_grammar_knows_may_come() -> None:
    it = matcher(grammar.from_regex("[0-9]+z"))
    assert {tokenizer().decode([id]) for id in allowed(it)} <= {str(number) for number in range(100)}
    follow(it, "12")
    assert not it.is_finished
    follow(it, "z")
    assert it.is_finished


def test_an_object_has_the_properties_that_it_names() -> None:
    place = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    schema = {"type": "object", "properties": {"to": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}}
    it = matcher(grammar.from_json_schema(schema))
    follow(it, '{"to": {"city": "Rome"')
    assert not any("," in tokenizer().decode([id]) for id in allowed(it))
    follow(it, "}}")
    assert it.is_finished

    part = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    it = matcher(grammar.from_json_schema({"allOf": [place, part]}))
    follow(it, '{"city": "Rome", "name": "Ada"')


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        (r'root ::= "\u0041bc"', "Abc", "\u41bc"),
        (r'root ::= "\U00000041bc"', "Abc", "\u41bc"),
        (r'root ::= "caf\u00e9"', "caf\xe9", "x"),
        (r'root ::= "\\u0041"', r"\u0041", "A"),
        (r'root ::= "\u0022\u005c"', '"\\', "u"),
        (r"root ::= [\u0430-\u044f]", "\u0436", "z"),
        (r"root ::= [^\u0000-\u001f]", "z", "\n"),
        (r'root ::= "\U0001F600"', "\U0001f600", "\uf600"),
    ],
)
def test_characters_of_gbnf_may_be_told_by_number(text: str, yes: str, no: str) -> None:
    it = matcher(grammar.from_ebnf(text))
    assert tokenizer().encode(no)[0] not in allowed(it)
    follow(it, yes)
    assert it.is_finished


@pytest.mark.parametrize(
    "dialect",
    [
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft-07/schema#",
        "http://json-schema.org/schema#",
        "https://spec.openapis.org/oas/3.1/dialect/base",
    ],
)
def test_a_dialect_that_nobody_knows_is_read_as_the_newest(dialect: str) -> None:
    follow(matcher(grammar.from_json_schema({"$schema": dialect, "type": "integer"})), "7")


def test_a_name_of_the_old_dialects_is_found() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#number"}
    schema |= {"definitions": {"of it": {"$id": "#number", "type": "integer"}}}
    follow(matcher(grammar.from_json_schema(schema)), "7")


@pytest.mark.parametrize(
    "made",
    [
        grammar.from_json_schema({"$ref": "#"}),
        grammar.from_json_schema(
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
        ),
        grammar.from_ebnf('root ::= root "a"'),
        grammar.from_regex(r"[^\s\S]"),
    ],
    ids=["itself", "each other", "rule", "no character"],
)
def test_what_no_text_fits_is_refused_whenever_it_is_asked_for(made: str) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match="no text fits it"):
            vocabulary().check(made)


@pytest.mark.parametrize(
    "made",
    [
        grammar.from_ebnf('root ::= ("x" | "y") b b\nb ::= "b"+'),
        grammar.from_ebnf('%llguidance {"no_forcing": false}\nstart: ("x" | "y") /b+/ "b"'),
        structural_tag({"format": {"type": "sequence", "elements": [X_OR_Y, MANY, MANY]}}, {}),
    ],
    ids=["gbnf", "lark", "structural tag"],
)
def test_a_text_that_never_ends_hangs_nobody(made: str) -> None:
    """In a process of its own: what hangs is in llguidance, where nothing could end it."""
    program = (
        "import sys; from pathlib import Path; from tandem.grammar import Vocabulary\n"
        "known = Vocabulary(Path(sys.argv[1])); known.check(sys.argv[2])\n"
        "it = known.matcher(sys.argv[2], eos_ids=[2])\n"
        "for token in map(int, sys.argv[3:]): it.accept(token); assert any(it.allowed())"
    )
    ids = map(str, tokenizer().encode("xbb"))
    run = [sys.executable, "-c", program, str(BUNDLED / "tokenizer.json"), made, *ids]
    assert subprocess.run(run, timeout=HUNG_S, check=False).returncode == 0


@pytest.mark.parametrize("pattern", ["", " ?", r"\s*", r"[ \n\t]{0,20}", "(?: |\n )?"])
def test_what_is_between_tokens_of_json_may_be_any_spaces(pattern: str) -> None:
    vocabulary().check(grammar.from_json_schema({}, whitespace=pattern))


@pytest.mark.parametrize("pattern", ["1+", "[]]+", r"\S", "[^a]*", "[,]", "[:]", "\\[+"])
def test_what_is_between_tokens_of_json_may_be_nothing_else(pattern: str) -> None:
    with pytest.raises(GrammarError, match="spaces only"):
        grammar.from_json_schema({"type": "array", "items": {"const": 1}, "minItems": 2}, whitespace=pattern)


def test_an_object_of_too_many_optional_properties_is_refused_before_its_first_brace() -> None:
    def objects(count: int) -> str:
        properties = {f"p{number}": {"type": "integer"} for number in range(count)}
        return grammar.from_json_schema({"type": "object", "properties": properties})

    vocabulary().check(objects(400))
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"^2399 parts of rules at one place, at most 2000: .* optional"):
            vocabulary().check(objects(600))


def test_an_answer_may_be_empty() -> None:
    vocabulary().check(grammar.from_regex(""))
    vocabulary().check(grammar.from_ebnf('root ::= ""'))


def chained(number: int) -> str:
    return "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(number)) + f'\nr{number}: "b"'


def referring(number: int, refer: Callable[[str], dict]) -> dict:
    links = {f"a{at}": refer(f"#/$defs/a{at + 1}") for at in range(number)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{number}": {"const": "b"}}}


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (grammar.from_ebnf(chained(5000)), "b"),
        (grammar.from_json_schema(referring(2500, lambda to: {"$ref": to})), '"b"'),
        (grammar.from_json_schema(referring(1500, lambda to: {"allOf": [{"$ref": to}]})), '"b"'),
    ],
)
def test_rules_behind_rules_end_no_process_however_many_there_are(made: str, text: str) -> None:
    """On the stack of a usual thread llguidance would: so another process is the first to do it."""
    code = f"""if True:
        import sys
        from pathlib import Path
        from tandem.grammar import Vocabulary
        it, made = Vocabulary(Path({str(BUNDLED / "tokenizer.json")!r}), size={SIZE}), sys.stdin.read()
        assert it.complaint(made) == ""
        it.check(made)
    """
    subprocess.run([sys.executable, "-c", code], input=made, text=True, timeout=HUNG_S, check=True)
    it = matcher(made)
    follow(it, text)
    assert it.is_finished


def test_empty_lines_cost_no_more_than_other_characters() -> None:
    """Whoever searches keeps the interpreter's lock: over a minute for 64 KiB, and the server's watchdog ends it."""
    texts = r"('\n' * 60_000 + 'x', ' ' * 60_000 + 'x', '\nstart ' * 8_000)"
    script = f"from tandem import grammar; print(any(map(grammar.IS_LARK.search, {texts})))"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HUNG_S, check=True)
    assert said.stdout == "False\n"
    assert grammar.IS_LARK.search("\n\n \t?start :")


def test_the_end_may_come_where_the_grammar_may_end_and_only_there() -> None:
    it = matcher(grammar.from_regex("ab|abc"))
    assert END not in allowed(it)
    follow(it, "ab")
    assert END in allowed(it)
    assert len(allowed(it)) > 1
    it.accept(END)
    assert it.is_finished


def test_who_ignores_ends_may_end_only_where_nothing_else_is_left() -> None:
    it = matcher(grammar.from_regex("ab|abc"), ignores_eos=True)
    follow(it, "ab")
    assert END not in allowed(it)
    follow(it, "c")
    assert it.is_finished


def test_after_its_end_a_grammar_forbids_nothing() -> None:
    it = matcher(grammar.from_regex("a"))
    follow(it, "a")
    assert len(allowed(it)) == SIZE
    it.accept(17)
    assert it.is_finished


def test_a_matcher_that_is_restarted_stands_where_one_made_anew_does() -> None:
    made = grammar.from_json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    one, other = matcher(made), matcher(made)
    outputs = tokenizer().encode('{"a": 12}')
    for token in outputs:
        one.accept(token)
    assert one.is_finished
    one.restart(outputs[:3])
    for token in outputs[:3]:
        other.accept(token)
    assert allowed(one) == allowed(other)
    assert not one.is_finished


def test_matchers_of_one_grammar_do_not_disturb_each_other() -> None:
    made = grammar.from_regex("abc")
    one, other = matcher(made), matcher(made)
    follow(one, "abc")
    assert not other.is_finished
    follow(other, "abc")


def test_spaces_of_json_come_to_an_end() -> None:
    it = matcher(grammar.from_json_schema({"type": "object"}))
    follow(it, "{ ")
    space = tokenizer().encode(" ")
    assert len(space) == 1
    assert space[0] not in allowed(it)


def test_logits_may_be_more_than_there_are_tokens() -> None:
    wide = Vocabulary(BUNDLED / "tokenizer.json", size=700)
    it = wide.matcher(grammar.from_regex("a"), eos_ids=[650])
    assert len(it.allowed()) == 22 * 4
    follow_bits = np.unpackbits(np.frombuffer(it.allowed(), np.uint8), bitorder="little")
    assert not follow_bits[SIZE:].any()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (grammar.from_regex("(a"), "unclosed group"),
        (grammar.from_json_schema({"type": "nope"}), "Invalid type: nope"),
        (grammar.from_lark("start: <nope>"), "unknown special token"),
        (grammar.from_lark("start: missing"), "missing"),
        (grammar.from_json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    ],
)
def test_what_does_not_compile_says_why_in_one_line(made: str, says: str) -> None:
    with pytest.raises(GrammarError, match=says) as failed:
        vocabulary().check(made)
    assert "\n" not in str(failed.value)
    assert len(str(failed.value)) <= 300


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"pattern": '^[^"]*$'}, ["a\\b\n/é", ""], ['"', 'a"b']),
        ({"pattern": "[^\\\\]"}, ['"', "a\\"], ["\\"]),
        ({"pattern": r"^[^]\"]+$"}, ["a[", "\\"], ["a]", '"']),
        ({"pattern": '^[^-"]$'}, ["\\", "+"], ["-", '"']),
        ({"pattern": r"^[\x00-\x1f]$"}, ["\n", "\x01"], ['"', "\\"]),
        ({"pattern": r"^\[\^]?$"}, ["[^", "[^]"], ["["]),
        ({"items": {"patternProperties": {'^[^"]$': {}}, "additionalProperties": False}}, [[{"a": 1}]], [[{'"': 1}]]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.01, 0.5], [0, -0.1, 0.6]),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, [1.01], [1, 1.5]),
        ({"type": "number", "exclusiveMaximum": -1, "minimum": -1.5}, [-1.5, -1.01], [-1, -2]),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, [-0.5], [0]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, [0.1], [0]),
        ({"allOf": [{"type": "number", "maximum": 0.5}, {"exclusiveMinimum": 0}]}, [0.1], [0]),
        ({"const": {"exclusiveMinimum": 0, "maximum": 0.5}}, [{"exclusiveMinimum": 0, "maximum": 0.5}], [0]),
        ({"properties": {"pattern": {"const": 1}, "const": {"pattern": '^[^"]$'}}}, [{"pattern": 1}], [{"const": '"'}]),
    ],
)
def test_what_llguidance_takes_for_something_else_is_followed(schema: dict, yes: list, no: list) -> None:
    made = grammar.from_json_schema(schema)
    vocabulary().check(made)
    assert [each for each in yes if not takes(made, each)] == []
    assert [each for each in no if takes(made, each)] == []


def test_what_is_wrong_with_a_pattern_is_where_it_was_written() -> None:
    made = grammar.from_json_schema({"type": "string", "pattern": '[^"](?!a)'})
    with pytest.raises(GrammarError, match="at character 5:"):
        vocabulary().check(made)


def takes(made: str, value: object) -> bool:
    it = LLMatcher(vocabulary()._tokenizer, made, log_level=0)
    ids = tokenizer().encode(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    return it.validate_tokens(ids) == len(ids) and it.consume_tokens(ids) and it.is_accepting()


def test_keywords_that_bound_nothing_have_to_be_asked_for() -> None:
    schema = {"type": "array", "uniqueItems": True}
    vocabulary().check(grammar.from_json_schema(schema, is_lenient=True))


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic's


def test_a_pattern_that_looks_around_bounds_nothing_where_that_may_be() -> None:
    named = {"pattern": {"type": "string", "pattern": DECIMAL}, "kept": {"type": "string", "pattern": r"^\\back$"}}
    schema = {"type": "object", "properties": named, "required": ["pattern", "kept"], "default": {"pattern": DECIMAL}}
    made = grammar.from_json_schema(schema, is_lenient=True)
    it = matcher(made)
    follow(it, '{"pattern": "any", "kept": "')
    assert {tokenizer().decode([id])[:1] for id in allowed(it)} == {"\\"}
    with pytest.raises(GrammarError, match="look-around"):
        vocabulary().check(grammar.from_json_schema(schema))


def test_ebnf_that_cannot_be_read_says_why() -> None:
    with pytest.raises(GrammarError, match="foo"):
        grammar.from_ebnf("root ::= foo")
    vocabulary().check(grammar.from_ebnf('root ::= "yes" | "no"'))


def test_parts_and_special_tokens() -> None:
    mark = tokenizer().special_names["<|im_start|>"]
    lark = f"start: {grammar.literal('a<|im_start|>', {'<|im_start|>': mark})} @number"
    it = matcher(grammar.from_parts(lark, {"number": grammar.from_json_schema({"type": "integer"})}))
    follow(it, "a")
    assert allowed(it) == {mark}
    it.accept(mark)
    follow(it, "12")
    assert END in allowed(it)


def test_tokens_that_no_text_spells_are_named() -> None:
    """`grammar_marks` has to know them as llguidance does."""
    added = ["<think>", "</think>", "<>", "<a b>", "<a>b", "a<b>", "<a", "a>", "[X]", "word"]
    its = load_tokenizer(None, added)
    made = its.open_vocabulary().matcher(grammar.from_regex(r"(.|\n)*"), eos_ids=[])
    bits = np.unpackbits(np.frombuffer(made.allowed(), np.uint8), bitorder="little")
    names = {name: its.encode(name)[0] for name in [*added, *its.special_names]}
    assert {name for name, id in names.items() if not bits[id]} == set(its.grammar_marks)
    assert {name: names[name] for name in its.grammar_marks} == its.grammar_marks


def test_a_grammar_that_outgrows_its_bounds_allows_nothing() -> None:
    it = matcher(grammar.from_regex("ab"))
    it.accept(tokenizer().encode("b")[0])  # which cannot be
    assert allowed(it) == set()


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "nope"}}))
    with pytest.raises(GrammarError, match="grammars cannot be followed with this tokenizer"):
        Vocabulary(path)


def test_no_token_but_those_of_the_model_ends_an_answer() -> None:
    """llguidance takes another one for the end, from the tokenizer's file."""
    it = vocabulary().matcher(grammar.from_regex("[0-9]+"), eos_ids=[END])
    follow(it, "7")
    special = set(tokenizer().special_ids)
    assert allowed(it) & special == {END}


def test_a_part_may_have_parts_of_its_own() -> None:
    inner = grammar.from_parts('start: "<" @number ">"', {"number": grammar.from_regex("[0-9]")})
    it = matcher(grammar.from_parts('start: "a" @answer', {"answer": inner}))
    follow(it, "a<7>")
    assert it.is_finished


@pytest.mark.parametrize(
    "value", [-(1 << 63), -(1 << 63) + 1, -9223372036854775296, -(1 << 63) - 1, -(1 << 90), -1e300, -(2.0**63)]
)
def test_a_number_that_would_end_the_process_is_refused_wherever_it_stands(value: float) -> None:
    """In a process of its own the library has a segmentation fault instead."""
    schema = {"items": {"type": "integer", "enum": ["x", value]}}
    for made in (
        grammar.from_json_schema(schema),
        grammar.from_lark(f"start: %json {json.dumps(schema)}"),
        grammar.from_lark(f"start: %json {json.dumps(schema, indent=0)}"),
    ):
        with pytest.raises(GrammarError, match="next to"):
            vocabulary().check(made)
        assert "next to" in vocabulary().complaint(made)


@pytest.mark.parametrize("value", [-9223372036854775295, (1 << 63) - 1, -922337203685477580])
def test_other_large_integers_compile(value: int) -> None:
    vocabulary().check(grammar.from_json_schema({"type": "integer", "const": value}))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"multipleOf": 123_456.789},
        {"multipleOf": 2**30},
        {"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]},
        {"anyOf": [{"type": "integer", "multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]},
    ],
)
def test_a_schema_whose_multiples_take_llguidance_seconds_is_refused_wherever_it_stands(schema: dict) -> None:
    """Nothing else would end it: its limits do not count remainders."""
    escaped = json.dumps(schema).replace("multiple", r"\u006dultiple")
    for made in (
        grammar.from_json_schema({"type": "object", "properties": {"a": {"items": schema}}}),
        grammar.from_lark(f"start: %json {json.dumps(schema)}"),
        grammar.from_lark(f"start: %json {json.dumps(schema, indent=1)}"),
        grammar.from_lark(f"start: %json {escaped}"),
    ):
        with pytest.raises(GrammarError, match="remainders"):
            vocabulary().check(made)
        assert "remainders" in vocabulary().complaint(made)


def test_such_multiples_bound_nothing_where_that_may_be() -> None:
    schema = {"type": "object", "properties": {"multipleOf": {"type": "integer", "multipleOf": 999_983}}}
    it = matcher(grammar.from_json_schema(schema, is_lenient=True))
    follow(it, '{"multipleOf": 7}')
    assert it.is_finished


@pytest.mark.parametrize("steps", [(0.01, 0.5, 12), (5_000_000,), (25_000,), (86_400,), (60, 3600, 7), (1e-7,)])
def test_multiples_that_are_asked_for_are_followed(steps: tuple[float, ...]) -> None:
    properties = {f"a{at}": {"type": "number", "multipleOf": step} for at, step in enumerate(steps)}
    vocabulary().check(grammar.from_json_schema({"type": "object", "properties": properties}))


def test_such_a_number_in_a_text_is_text() -> None:
    vocabulary().check(grammar.from_json_schema({"enum": ["order-12345678901234567890", "-9223372036854775808x"]}))


def test_what_is_kept_of_what_may_come_next_is_what_llguidance_says() -> None:
    """After every token of answers drawn at random; with more logits than tokens, and tokens that no text spells."""
    path, size = BUNDLED / "tokenizer.json", 700
    mine = Vocabulary(path, size=size)
    mark = tokenizer().special_names["<|im_start|>"]
    schema = {"type": "array", "items": {"type": "object", "properties": {"é\n": {"enum": ["x y", 7]}}}, "minItems": 9}
    for made in (
        grammar.from_json_schema(schema),
        grammar.from_regex("(Wälder und Wiesen|[a-z]{2,9} 12345, )+"),
        grammar.from_lark(f'start: ("say: " <[{mark}]> /[0-9]+/ "; ")+'),
        grammar.from_regex(r"(.|\n)*"),
    ):
        draw = random.Random(3)
        its = mine.matcher(made, eos_ids=[END])
        theirs = LLMatcher(LLTokenizer(path.read_text(), n_vocab=size), made, log_level=0)
        steps = 0
        while not theirs.is_stopped() and steps < 120:
            steps += 1
            expected, found = ids_in(theirs.compute_bitmask()), ids_in(its.allowed())
            assert found - {END} == expected - {0}, "0 is what llguidance takes for the end"
            assert (END in found) == theirs.is_accepting()
            token = draw.choice(sorted(found - {END}))
            its.accept(token)
            theirs.consume_token(token)
        assert steps > 30


def test_a_text_that_has_to_come_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Counting(RememberingTokenizer):
        def __init__(self, own: LLTokenizer) -> None:
            super().__init__(own)
            self._known = lru_cache(9)(lambda text: asked.append(text) or own.tokenize_str(text))

    monkeypatch.setattr(grammar, "RememberingTokenizer", Counting)
    fresh = Vocabulary(BUNDLED / "tokenizer.json", size=SIZE)
    for _ in range(3):
        it = fresh.matcher(grammar.from_regex("(the same words )+"), eos_ids=[END])
        follow(it, "the same")
    assert asked
    assert len(asked) == len(set(asked))


def test_who_looks_ahead_finds_for_each_what_each_would_have_found_alone() -> None:
    """Whoever has ended, failed or not begun among them."""
    made = grammar.from_regex("[ab]c|a[0-9]+z")
    texts = ("", "a", "ac", "a12", "b", "a1z")

    def rows() -> list[Matcher]:
        found = [matcher(made) for _ in texts]
        for it, text in zip(found, texts, strict=True):
            for token in tokenizer().encode(text):
                it.accept(token)
        found[4].accept(tokenizer().encode("z")[0])  # which cannot be
        return found

    together, alone = rows(), rows()
    look_ahead(together)
    assert [allowed(it) for it in together] == [allowed(it) for it in alone]
    assert [it.is_finished for it in together] == [False, False, True, False, False, True]
    assert [len(allowed(it)) for it in together][2:] == [SIZE, len(allowed(alone[3])), 0, SIZE]
    look_ahead(together[:2])  # nothing has come since
    (token,) = tokenizer().encode("a")
    together[0].accept(token)
    look_ahead(together)
    assert allowed(together[0]) == allowed(alone[1])
    together[0].restart(())
    look_ahead(together)
    assert allowed(together[0]) == allowed(alone[0])
