"""The form of an answer: every field that asks for one becomes one grammar, or a 400 that names field and place."""

import asyncio
import json

import pytest
from api_fakes import TEMPLATE, load_tokenizer, tokenizer, world

from tandem import grammar
from tandem.server.api.body import ChatBody, CompletionBody, NativeBody, NativeSampling, StructuredOutputs
from tandem.server.api.bounds import MAX_GRAMMAR_CHARS
from tandem.server.api.foreign_fields import Foreign, handled
from tandem.server.api.messages import MessagesBody
from tandem.server.api.responses import ResponsesBody
from tandem.server.api.structured_output import are_same
from tandem.server.api.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "x"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<call=add>", "schema": PERSON, "end": "</call>"}],
    "triggers": ["<call="],
}
TREE = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call="],
        "tags": [
            {"begin": "<call=add>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</call>"},
            {"begin": "<call=word>", "content": {"type": "regex", "pattern": "[a-z]+"}, "end": "</call>"},
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
SEQUENCE = {
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "I say "},
            {"type": "or", "elements": [{"type": "grammar", "grammar": 'root ::= "yes"'}, {"type": "any_text"}]},
        ],
    }
}
YES = ['{"name": "Tom", "age": 3}', '{"name":"Tom","age":3}']
NO = ['{"name": "Tom"}', "yes", '{"age": 3, "name": "Tom"}']
ASKED = [
    ({"response_format": NAMED}, YES, NO),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, ["{}"], ["[]"]),
    ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1, 2]}'], ["[1]", "x"]),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, YES, NO),
    ({"response_format": {"type": "json_object", "schema": {}}}, ["{}"], ["[]"]),
    ({"response_format": {"type": "json_object", "value": PERSON}}, YES, NO),
    ({"guided_json": PERSON}, YES, NO),
    ({"guided_json": {"$id": "Output Format"} | PERSON}, YES, NO),
    ({"guided_json": json.dumps(PERSON)}, YES, NO),
    ({"json_schema": json.dumps(PERSON)}, YES, NO),
    ({"structured_outputs": {"json": PERSON}}, YES, NO),
    ({"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}, YES[1:], YES[:1]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    ({"guided_json_object": True}, ["{}"], ["[]"]),
    ({"guided_json": {}}, ["1", "[]", '"a"'], ["a"]),
    ({"regex": "[a-c]{2,3}"}, ["ab", "abc"], ["abcd", "x"]),
    ({"guided_regex": "yes|no"}, ["yes", "no"], ["maybe"]),
    ({"structured_outputs": {"regex": "yes|no"}}, ["yes"], ["maybe"]),
    ({"guided_choice": ["yes", 'say "no"', "grün"]}, ["yes", 'say "no"', "grün"], ["no"]),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ["a"], ["c"]),
    ({"ebnf": 'root ::= "a" [0-9]+'}, ["a12"], ["a"]),
    ({"guided_grammar": 'start: "a" /[0-9]+/'}, ["a12"], ["a"]),
    ({"guided_grammar": '?start: sum\n?sum: /[0-9]/ ("+" /[0-9]/)*'}, ["1", "1+2"], ["1+"]),
    ({"ebnf": '\n  !start: "a" | "b"'}, ["a"], ["c"]),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ["a"], ["b"]),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}, "guided_grammar": 'root ::= "a"'}, ["a"], ["b"]),
    ({"structured_outputs": {"json": PERSON}, "guided_json": PERSON}, YES, NO),
    ({"response_format": TAGS}, ["hi", f"so <call=add>{YES[0]}</call> end"], ["so <call=sub>1</call>"]),
    ({"structural_tag": json.dumps(TAGS)}, [f"<call=add>{YES[0]}</call>"], ["<call=add>{}</call>"]),
    ({"structural_tag": TREE}, ["so <call=word>abc</call>"], ["so", "<call=word>abc</call> more"]),
    ({"structured_outputs": {"structural_tag": SEQUENCE}}, ["I say yes", "I say anything"], ["You say yes"]),
]
UNASKED = [
    {},
    {"response_format": {"type": "text"}},
    {"response_format": None, "guided_json": None, "regex": "", "ebnf": "", "guided_choice": []},
    {"structured_outputs": {}, "structural_tag": {}, "json_schema": ""},
]
REFUSED = [
    ({"response_format": {"type": "nope"}}, "response_format", "nope"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_object", "schema": {"type": "nope"}}}, "response_format", "Invalid type: nope"),
    ({"guided_json": {"type": "nope"}}, "guided_json", "Invalid type: nope"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": "[]"}, "guided_json", "an object"),
    (
        {"guided_json": {"type": "object", "properties": {"a/b": {"items": {"type": "nope"}}}}},
        "guided_json",
        "at /properties/a~1b/items: Invalid type: nope",
    ),
    ({"guided_json": {"uniqueItems": True, "type": "array"}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"$ref": "#/$defs/missing"}}, "guided_json", "missing"),
    ({"regex": "b(a"}, "regex", "at character 2: unclosed group"),
    ({"ebnf": 'root ::= "a" |\n  foo'}, "ebnf", "Rule 'foo' not found, which line 2 asks for"),
    ({"ebnf": 'root ::= "a"\nb ::= )'}, "ebnf", "at line 2"),
    ({"guided_grammar": 'start: "a"\n  | foo'}, "guided_grammar", 'at 1(8): unknown name: "foo"'),
    ({"guided_json": {"properties": {"a": {"pattern": "b(a"}}}}, "guided_json", "at character 2: unclosed group"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "length >= 1"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "at character 1: unclosed group"),
    (
        {"structured_outputs": {"disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
        "not supported",
    ),
    ({"regex": "a", "guided_json": PERSON}, "guided_json", "contradicts regex"),
    (
        {"structured_outputs": {"json": {"const": 1}}, "guided_json": {"const": True}},
        "structured_outputs.json",
        "contradicts guided_json",
    ),
    ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "regex", "length"),
    ({"guided_json": {"const": "a" * MAX_GRAMMAR_CHARS}}, "guided_json", "at most"),
    ({"structural_tag": {"format": {"type": "nope"}}}, "structural_tag", "at /format: there is no type 'nope'"),
    ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structural_tag", "at /structures"),
    (
        {"structural_tag": {"structures": [{"begin": "a", "end": "b"}], "triggers": ["<"]}},
        "structural_tag",
        "at /tags/0/begin: begins with no trigger",
    ),
]


def grammar_of(body: dict, path: str = "/v1/chat/completions", its: Tokenizer | None = None) -> str:
    with (w := world(tokenizer=its)).http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return w.node.submits[0].payload.sampling.grammar


def accepts(made: str, text: str, its: Tokenizer | None = None) -> bool:
    its = its or tokenizer()
    end = 1
    matcher = its.open_vocabulary().matcher(made, eos_ids=[end])
    for token in [*its.encode(text), end]:
        if matcher.is_finished:
            return token == end
        if not matcher.allowed()[token >> 3] >> (token & 7) & 1:
            return False
        matcher.accept(token)
    return matcher.is_finished


@pytest.mark.parametrize(("asked", "yes", "no"), ASKED, ids=lambda value: str(value)[:40])
def test_what_is_asked_for_bounds_the_answer(asked: dict, yes: list[str], no: list[str]) -> None:
    made = grammar_of(CHAT | asked)
    assert [text for text in yes if not accepts(made, text)] == []
    assert [text for text in no if accepts(made, text)] == []
    if "response_format" not in asked:
        assert grammar_of(COMPLETION | asked, "/v1/completions") == made


MARKED = {
    "type": "triggered_tags",
    "triggers": ["<call>", "so <note>: "],
    "tags": [
        {"begin": "<call>", "content": {"type": "regex", "pattern": "[a-z]"}, "end": "</call>"},
        {"begin": "so <note>: ", "content": {"type": "any_text"}, "end": "</note>"},
    ],
    "at_least_one": True,
}


def test_a_mark_of_a_tag_may_be_a_token_of_its_own() -> None:
    its = load_tokenizer(TEMPLATE, ["<call>", "</call>", "<note>", "</note>"])
    made = grammar_of(CHAT | {"structural_tag": {"format": MARKED}}, its=its)
    yes = ["<call>a</call>", "I <call>a</call> and <call>b</call>.", "so <note>: A <b> is </note> it"]
    no = ["a", "<call>A</call>", "<note>a</note>", "<call>a</note>", "so <note>: a"]
    assert [text for text in yes if not accepts(made, text, its)] == []
    assert [text for text in no if accepts(made, text, its)] == []


@pytest.mark.parametrize("asked", UNASKED, ids=str)
def test_blank_fields_leave_the_answer_free(asked: dict) -> None:
    assert grammar_of(CHAT | asked) == ""


@pytest.mark.parametrize(("asked", "param", "says"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_what_cannot_be_is_the_same_400_on_every_server(asked: dict, param: str, says: str, mode: str) -> None:
    pair = {} if mode == "null" else {"bootstrap_host": "127.0.0.1", "bootstrap_room": 7}
    with (w := world(disaggregation_mode=mode)).http() as http:
        response = http.post("/v1/chat/completions", json=CHAT | pair | asked)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert w.node.submits == []


def test_a_schema_that_is_not_strict_may_say_more_than_can_be_followed() -> None:
    schema = {"type": "array", "uniqueItems": True}
    made = grammar_of(
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}}
    )
    assert accepts(made, "[1, 1]")


@pytest.mark.parametrize(
    ("asked", "yes", "no"),
    [({"regex": "ab?"}, "ab", "b"), ({"ebnf": 'root ::= "a"'}, "a", "b"), ({"json_schema": "{}"}, "{}", "a")],
)
def test_the_native_dialect(asked: dict, yes: str, no: str) -> None:
    made = grammar_of({"text": "x", "sampling_params": asked}, "/generate")
    assert accepts(made, yes)
    assert not accepts(made, no)


def test_every_prompt_of_the_native_dialect_has_its_own() -> None:
    with (w := world()).http() as http:
        body = {"text": ["x", "y"], "sampling_params": [{"regex": "a"}, {"regex": "(b"}]}
        refused = http.post("/generate", json=body)
        body["sampling_params"][1] = {}
        http.post("/generate", json=body)
    assert refused.json()["error"]["param"] == "sampling_params.regex"
    assert [accepts(submit.payload.sampling.grammar, "a") for submit in w.node.submits[:1]] == [True]
    assert w.node.submits[1].payload.sampling.grammar == ""


def test_both_halves_come_to_the_same_grammar() -> None:
    found = set()
    for mode in ("prefill", "decode"):
        with (w := world(disaggregation_mode=mode, digest_secret=b"s" * 32)).http() as http:
            body = CHAT | {"response_format": NAMED, "bootstrap_host": "127.0.0.1", "bootstrap_room": 7}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        found.add((w.node.submits[0].payload.sampling.grammar, w.node.submits[0].request.prompt_digest))
    assert len(found) == 1


def test_a_nested_schema_beyond_all_reason_is_a_400() -> None:
    schema: dict = {}
    for _ in range(100):
        schema = {"items": schema}
    with world().http() as http:
        response = http.post("/v1/chat/completions", json=CHAT | {"guided_json": schema})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_json")


def test_outputs_nested_beyond_all_reason_are_not_the_same_as_others() -> None:
    schema: dict = {}
    for _ in range(5000):
        schema = {"items": schema}
    assert not are_same(StructuredOutputs(), StructuredOutputs(json=schema))
    assert are_same(StructuredOutputs(json={"items": {}}), StructuredOutputs(json={"items": {}}))


def test_a_type_nested_beyond_all_reason_is_a_400_and_not_repeated_whole() -> None:
    kind: dict = {}
    for _ in range(900):
        kind = {"a": kind}
    with world().http() as http:
        response = http.post("/v1/chat/completions", json=CHAT | {"response_format": {"type": kind}})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert len(error["message"]) < 300


def test_another_servers_names_are_refused_with_ours() -> None:
    asked = {
        "/v1/chat/completions": {
            "max_new_tokens": "max_tokens",
            "num_predict": "max_tokens",
            "max_output_tokens": "max_tokens",
            "maxTokens": "max_tokens",
            "stop_words": "stop",
            "num_return_sequences": "n",
            "repeat_penalty": "repetition_penalty",
            "grammar": "guided_grammar",
            "format": "response_format",
        },
        "/generate": {
            "max_new_tokens": "sampling_params.max_new_tokens",
            "max_tokens": "sampling_params.max_new_tokens",
            "stop": "sampling_params.stop",
            "grammar": "sampling_params.ebnf",
        },
    }
    bodies = {"/v1/chat/completions": CHAT, "/generate": {"text": "x"}}
    with world().http() as http:
        for path, names in asked.items():
            for name, ours in names.items():
                error = http.post(path, json=bodies[path] | {name: 5}).json()["error"]
                assert (error["param"], error["code"]) == (name, "unsupported")
                assert error["message"].endswith(f": here it is {ours}"), error["message"]
        body = {"text": "x", "sampling_params": {"max_tokens": 5}}
        error = http.post("/generate", json=body).json()["error"]
    assert error["message"].endswith(": here it is max_new_tokens")


ENDPOINTS = {
    "/v1/chat/completions": (ChatBody, CHAT),
    "/v1/completions": (CompletionBody, {"prompt": "x"}),
    "/v1/messages": (MessagesBody, CHAT | {"max_tokens": 5}),
    "/v1/responses": (ResponsesBody, {"input": "x"}),
    "/generate": (NativeBody, {"text": "x"}),
}
LORA = ("lora_path", "lora_request", "lora_name", "lora", "loras", "adapter_id")


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_field_that_bounds_or_shapes_output_is_ignored(path: str) -> None:
    """What an endpoint does not read under one of these names it refuses, by that name."""
    kind, body = ENDPOINTS[path]
    foreign = [name for name in Foreign.__struct_fields__ if name not in handled(kind)]
    assert len(foreign) > 30
    with (w := world()).http() as http:
        for name in (*foreign, *LORA):
            response = http.post(path, json=body | {name: 7})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text
        assert w.node.submits == []
        if path == "/generate":
            for name in [name for name in Foreign.__struct_fields__ if name not in handled(NativeSampling)]:
                error = http.post(path, json=body | {"sampling_params": {name: 7}}).json()["error"]
                assert error["param"] == f"sampling_params.{name}"


DEFAULTS = {
    "typical_p": 1.0,
    "mirostat": 0,
    "repeat_penalty": 1,
    "length_penalty": 1.0,
    "do_sample": True,
    "num_beams": 1,
    "use_beam_search": False,
    "stop_regex": None,
    "suffix": "",
    "logits_processors": [],
    "options": {},
    "format": "",
    "grammar": False,
    "enable_thinking": None,
    "top_n_sigma": -1,
    "reasoning_budget": -1,
    "sampling_params": {},
    "lora": [],
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_defaults_that_programs_fill_in_ask_for_nothing(path: str) -> None:
    kind, body = ENDPOINTS[path]
    with world().http() as http:
        sent = {name: value for name, value in DEFAULTS.items() if name not in handled(kind)}
        assert http.post(path, json=body | sent).status_code == 200


@pytest.mark.parametrize(
    "wish",
    [b'"do_sample": false', b'"enable_thinking": false', b'"typical_p": 1e400', b'"top_a": false', b'"n_cmpl": true'],
)
def test_a_wish_that_looks_like_nothing_is_one(wish: bytes) -> None:
    with world().http() as http:
        response = http.post("/v1/completions", content=b'{"prompt": "x", %s}' % wish)
    assert (response.status_code, response.json()["error"]["param"]) == (400, wish.split(b'"')[1].decode())


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (b'"guided_json": {"minimum": 1e400}', "guided_json"),
        (b'"guided_json": {"minimum": 10e308, "maximum": 1e-999}', "guided_json"),
        (b'"structural_tag": {"format": {"type": ["x"]}}', "structural_tag"),
        (b'"structural_tag": {"format": {"type": "or", "elements": [{"type": {}}]}}', "structural_tag"),
        (b'"response_format": {"type": ["json_object"]}', "response_format"),
    ],
)
def test_what_fuzzing_has_found_is_a_400(asked: bytes, param: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], ' + asked + b"}"
    with world().http(raise_server_exceptions=False) as http:
        response = http.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_large_grammar_is_not_converted_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[bool] = []
    convert = grammar.from_ebnf

    def seen(text: str) -> str:
        loops.append(asyncio._get_running_loop() is not None)
        return convert(text)

    monkeypatch.setattr(grammar, "from_ebnf", seen)
    grammar_of(CHAT | {"ebnf": "root ::= " + '"a" | ' * 500 + '"b"'})
    assert loops == [False]
