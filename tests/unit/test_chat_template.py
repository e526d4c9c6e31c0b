"""`--chat-template`: a file, or the template itself, in place of the model's own."""

from pathlib import Path

import pytest
from engine_files import write_model
from test_tokenizer_files import made, render

from tandem.cli.failure import CommandFailed
from tandem.cli.serve import read_facts
from tandem.config import ServerConfig
from tandem.server.api.tokenizer import Tokenizer

OWN = "{{ messages[0].content }} as it is"


def template_of(model: Path, given: str | None) -> str:
    return read_facts(model, ServerConfig(model=str(model), chat_template=given)).chat_template


def test_it_is_what_the_file_has_or_the_template_itself(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "own.jinja").write_text(OWN)

    assert template_of(tmp_path, str(tmp_path / "own.jinja")) == template_of(tmp_path, OWN) == OWN
    assert template_of(tmp_path, None) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent.jinja", None),
        ("chatml", None),
        ("empty.jinja", b""),
        ("own.json", b'{"name": "vicuna"}'),
        ("b", b"\xff{"),
    ],
)
def test_what_is_no_template_is_refused_before_anything_starts(tmp_path: Path, name: str, text: bytes | None) -> None:
    write_model(tmp_path)
    if text is not None:
        (tmp_path / name).write_bytes(text)

    with pytest.raises(CommandFailed, match="--chat-template .*" + name):
        template_of(tmp_path, str(tmp_path / name))


def test_the_home_of_nobody_is_refused_too_and_only_the_first_host_reads_it(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(CommandFailed, match="--chat-template ~nobody-here/x"):
        template_of(tmp_path, "~nobody-here/x")
    follower = ServerConfig(model=str(tmp_path), chat_template="~nobody-here/x", nnodes=2, node_rank=1)
    assert read_facts(tmp_path, follower).chat_template == ""


def test_it_wins_over_all_templates_of_the_model(tmp_path: Path) -> None:
    made(tmp_path, {"chat_template": [{"name": "tool_use", "template": "tools"}]}, template_file="file")

    assert render(Tokenizer(tmp_path, template="given"), tools=[{}]) == "given"


def test_one_that_cannot_be_compiled_is_refused_and_not_at_the_first_chat(tmp_path: Path) -> None:
    made(tmp_path, {})

    with pytest.raises(ValueError, match="--chat-template cannot be compiled"):
        Tokenizer(tmp_path, template="{% for m in messages %}")
