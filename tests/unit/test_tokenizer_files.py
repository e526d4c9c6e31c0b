"""What is read from a model directory, against transformers where it is the authority."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

import tandem
from tandem.server.api.errors import Refusal
from tandem.server.api.tokenizer import Tokenizer

BUNDLED = Path(tandem.__file__).parent / "bundled" / "mini"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 12 + 30? <b>é😀</b>"},
]


def made(directory: Path, config: dict, *, bos: bool = False, template_file: str | None = None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={t: i for i, t in enumerate(["<s>", "</s>", *alphabet])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "</s>"])
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    raw.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template_file is not None:
        (directory / "chat_template.jinja").write_text(template_file)
    return Tokenizer(directory)


def render(tokenizer: Tokenizer, **variables: object) -> str:
    return tokenizer.render_chat(MESSAGES, add_generation_prompt=True, variables=variables, rendered_at=1).text


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content }", "{{ " + "(" * 5_000])
def test_a_template_that_cannot_be_compiled_is_said_where_one_is_needed(tmp_path: Path, template: str) -> None:
    """Prompts that are no chat are served: the server starts."""
    tokenizer = made(tmp_path, {"chat_template": template})
    assert tokenizer.encode("a")
    with pytest.raises(Refusal, match="the chat template of this model cannot be compiled"):
        render(tokenizer)


@pytest.mark.parametrize(("knows", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_to_a_template_that_knows_none(tmp_path: Path, knows: str, role: str) -> None:
    """Most templates leave out whoever they do not know."""
    tokenizer = made(
        tmp_path, {"chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}" + knows}
    )
    messages = [{"role": "developer", "content": "Be brief."}]
    said = tokenizer.render_chat(messages, add_generation_prompt=True, variables={}, rendered_at=1).text
    assert said == f"{role}: Be brief."


def test_the_bundled_tokenizer_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(BUNDLED))
    ours = Tokenizer(BUNDLED)
    for add in (True, False):
        rendered = ours.render_chat(MESSAGES, add_generation_prompt=add, variables={}, rendered_at=1)
        assert rendered.text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add)
    for text in ("Question: 1 + 2?\nAnswer: 3", "é😀 日本", "<|im_start|>user", "", "  two  spaces"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_ids == set(theirs.all_special_ids)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}",
        "{{ messages[1]['content'] | tojson(indent=2) }}{{ bos_token }}{{ eos_token }}",
        "{%- for m in messages %}\n  {%- if loop.first %}\n  {%- continue %}\n {%- endif %}\n{{ m.role }}{%- endfor %}",
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
        "{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{% set y = 3 %}{{ x }}{% endgeneration %}{{ x }}{{ y }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 %}{% endfor %}{{ ns.n }}",
        "{{ messages[0]['content'].split('.')[0] }}{% if thinking is defined %}{{ thinking }}{% endif %}",
    ],
)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    ours = made(tmp_path, config)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    theirs.chat_template = template
    assert render(ours, thinking="on") == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True, thinking="on"
    )


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    assert render(made(tmp_path, {"chat_template": "old"}, template_file="new")) == "new"


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert render(made(tmp_path, {"chat_template": templates})) == "plain"


@pytest.mark.parametrize(
    ("config", "beside"),
    [
        ({"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}, {}),
        ({}, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}),
        ({"bos_token": "</s>"}, {"bos_token": "<s>"}),
        ({"bos_token": "<s>", "added_tokens_decoder": {}}, {"bos_token": "</s>"}),
        ({"extra_special_tokens": {"image_token": "<s>"}, "audio_token": "</s>"}, {}),
    ],
    ids=str,
)
def test_templates_are_told_the_special_tokens_as_in_transformers(tmp_path: Path, config: dict, beside: dict) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(beside))
    template = "{{ bos_token }} {{ eos_token }} {{ image_token }} {{ audio_token }}"
    ours = made(tmp_path, {**config, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template})
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))

    assert render(ours) == theirs.apply_chat_template(MESSAGES, tokenize=False)


@pytest.mark.parametrize("is_added", [True, False])
def test_what_the_configuration_calls_special_is_special_as_in_transformers(tmp_path: Path, is_added: bool) -> None:
    """Checkpoints that were converted by hand have the end in the vocabulary alone, or as a token like others."""
    transformers = pytest.importorskip("transformers")
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    made(tmp_path, config, bos=True)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    plain = [{**token, "special": False} for token in definition["added_tokens"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps({**definition, "added_tokens": plain if is_added else []}))
    ours, theirs = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(str(tmp_path))

    ids = ours.encode("a</s>b")
    assert ids == theirs.encode("a</s>b")
    assert ids[2] == 1
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab"
    assert ours.special_ids == set(theirs.all_special_ids)


def test_the_others_of_several_templates_may_be_in_a_folder_as_in_transformers(tmp_path: Path) -> None:
    """As transformers saves them, and reads them: a chat with tools has one of its own."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    ours = made(tmp_path, {"chat_template": "old", "tokenizer_class": "PreTrainedTokenizerFast"}, template_file="plain")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))

    assert ours.templates == theirs.chat_template
    assert render(ours) == "plain"
    assert render(ours, tools=[{"type": "function"}]) == "tools"


def test_a_template_can_refuse(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no system message"):
        render(made(tmp_path, {"chat_template": "{{ raise_exception('no system message') }}"}))


def test_special_tokens_are_added_for_completions_only(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, {"bos_token": "<s>"}, bos=True)
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]


def test_a_configuration_can_switch_the_first_token_off(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, {"bos_token": "<s>", "add_bos_token": False}, bos=True)
    assert 0 not in tokenizer.encode("a")
    assert tokenizer.encode("<s>a")[0] == 0  # the user's own


def test_a_long_text_is_encoded_as_a_short_one(tmp_path: Path) -> None:
    import asyncio

    tokenizer = made(tmp_path, {"bos_token": "<s>"}, bos=True)
    text = "lorem ipsum " * 5000
    assert asyncio.run(tokenizer.encode_anywhere(text)) == tokenizer.encode(text)


LONG_TEXT = """
import asyncio, sys
from pathlib import Path
from tandem.server.api.tokenizer import Tokenizer

def most_bytes():
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

tokenizer = Tokenizer(Path(sys.argv[1]))
tokenizer.encode("x")
before = most_bytes()
ids = asyncio.run(tokenizer.encode_anywhere("\u2603" * 200_000))
print((most_bytes() - before) // len(ids))
"""


def test_a_long_text_takes_no_memory_for_where_its_tokens_stand() -> None:
    """194 bytes a token, of which each is a byte here; 246 with the account that nobody reads."""
    done = subprocess.run([sys.executable, "-c", LONG_TEXT, str(BUNDLED)], capture_output=True, text=True, check=True)
    assert 50 < int(done.stdout) < 220


def test_a_directory_without_tokenizer_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist: save the model"):
        Tokenizer(tmp_path)


def test_transformers_is_not_imported_by_the_server() -> None:
    import subprocess
    import sys

    code = (
        "import sys, tandem.server.api.app; "
        "bad = {'transformers', 'torch', 'numpy'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
