"""From what a user calls a model to a directory, or to the one sentence that says what to do instead."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, utils

from tandem.cli import main as cli
from tandem.cli import serve
from tandem.cli.failure import CommandFailed
from tandem.cli.model_source import find_model
from tandem.engine.model_config import read_config
from tandem.engine.transformers_facts import examined_here


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("model-Q4_K_M.gguf", "has model-Q4_K_M.gguf and no safetensors: give that file itself"),
        ("pytorch_model.bin", "has pytorch_model.bin and no safetensors: pickled weights are not read"),
    ],
)
def test_weights_in_another_format_are_named(tmp_path: Path, file: str, reason: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(CommandFailed, match=reason):
        find_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert find_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_that_is_not_there_is_no_hub_name(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandFailed, match=r"model.gguf does not exist"):
        find_model("model.gguf")


def test_one_part_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    part = tmp_path / "model-00001-of-00003.gguf"
    part.touch()
    with pytest.raises(CommandFailed, match="one of several parts; join them first"):
        find_model(str(part))


def answer(status: int) -> Any:
    request = httpx.Request("GET", "https://huggingface.co/a/b")
    return httpx.Response(status, request=request)


@pytest.mark.parametrize(
    ("error", "is_offline", "reason"),
    [
        (utils.LocalEntryNotFoundError("x"), True, "HF_HUB_OFFLINE forbids to ask the hub.*run `hf download a/b`"),
        (utils.LocalEntryNotFoundError("x"), False, "the hub cannot be reached .* check the network"),
        (utils.RepositoryNotFoundError("x", response=answer(401)), False, "the hub has no model a/b, or a private one"),
        (utils.GatedRepoError("x", response=answer(403)), False, "licence to be accepted: .*/a/b, and set HF_TOKEN"),
        (OSError("disk full\nmore"), False, r"does not give a model of that name \(disk full\)"),
    ],
)
def test_why_the_hub_gave_nothing_is_one_sentence_with_what_to_do(
    error: Exception, is_offline: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    with pytest.raises(CommandFailed, match=reason):
        find_model("a/b")


def test_a_model_of_the_hub_without_safetensors_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CommandFailed, match="a/b has no safetensors on the hub"):
        find_model("a/b")


def test_an_architecture_that_is_not_there_is_one_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "read_config", partial(read_config, examine=examined_here))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    (tmp_path / "model.safetensors").touch()
    assert cli.run_command("serve", [str(tmp_path), "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the architecture 'MambaForCausalLM' is not supported: its attention in transformers cannot be" in line
