"""How requests are sampled that do not say: as the checkpoint says, or as the API of OpenAI does."""

import json
from pathlib import Path

import pytest
from api_fakes import world
from engine_files import write_model

from tandem.cli.failure import CommandFailed
from tandem.cli.serve import read_facts
from tandem.config import ServerConfig
from tandem.engine.documents import ModelError
from tandem.engine.generation_config import read_sampling_defaults
from tandem.sampling import SamplingDefaults, SamplingParams

GIVEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
DEFAULTS = SamplingDefaults(**GIVEN)
USER = [{"role": "user", "content": "hi"}]
ENDPOINTS = {
    "/generate": {"text": "abc"},
    "/v1/completions": {"model": "toy", "prompt": "abc"},
    "/v1/chat/completions": {"model": "toy", "messages": USER},
    "/v1/messages": {"model": "toy", "messages": USER, "max_tokens": 9},
}


def said(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in GIVEN}


def asked(endpoint: str, fields: dict, defaults: SamplingDefaults) -> dict[str, float]:
    """What the workers are told of a request with these fields of its own."""
    own = {"sampling_params": fields} if endpoint == "/generate" else fields
    with (w := world(sampling_defaults=defaults)).http() as http:
        answer = http.post(endpoint, json=ENDPOINTS[endpoint] | own)
    assert answer.status_code == 200, answer.text
    return said(w.node.submits[0].payload.sampling)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_endpoint_samples_as_the_server_was_told_to(endpoint: str) -> None:
    assert asked(endpoint, {}, DEFAULTS) == GIVEN
    assert asked(endpoint, {}, SamplingDefaults()) == said(SamplingParams())


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_field_of_the_body_wins_even_where_it_says_that_there_is_nothing(endpoint: str) -> None:
    own = {"temperature": 0, "top_p": 1, "top_k": 0}
    if endpoint != "/v1/messages":
        own |= {"min_p": 0, "repetition_penalty": 1}

    assert asked(endpoint, own, DEFAULTS) == GIVEN | own


def test_null_in_a_body_says_nothing() -> None:
    assert asked("/v1/chat/completions", dict.fromkeys(GIVEN), DEFAULTS) == GIVEN


# --- the file --------------------------------------------------------------------------------------------------------


def facts_of(where: Path, **settings: str) -> SamplingDefaults:
    return read_facts(where, ServerConfig(model=str(where), **settings)).sampling_defaults  # type: ignore[arg-type]  # of many types


def test_a_server_takes_the_checkpoints_defaults_unless_it_is_told_not_to(tmp_path: Path) -> None:
    write_model(tmp_path, generation=GIVEN | {"do_sample": True, "max_new_tokens": 7, "eos_token_id": [2, 3]})

    assert facts_of(tmp_path) == facts_of(tmp_path, sampling_defaults="model") == DEFAULTS
    assert facts_of(tmp_path, sampling_defaults="openai") == SamplingDefaults()


@pytest.mark.parametrize("generation", [None, {}, dict.fromkeys(GIVEN), {"top_k": -1, "temperature": 1}], ids=str)
def test_what_is_absent_is_as_usual(tmp_path: Path, generation: dict | None) -> None:
    write_model(tmp_path, generation=generation)

    assert read_sampling_defaults(tmp_path) == SamplingDefaults()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.6"),
        ("temperature", 101),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", True),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", [1.1]),
    ],
)
def test_numbers_that_no_request_could_ask_for_are_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    write_model(tmp_path, generation={name: value})

    with pytest.raises(ModelError, match=f"generation_config.json: {name} is ") as caught:
        read_sampling_defaults(tmp_path)
    with pytest.raises(CommandFailed, match=name):
        facts_of(tmp_path)

    assert str(caught.value).isprintable()
    assert facts_of(tmp_path, sampling_defaults="openai") == SamplingDefaults()


def test_every_token_that_the_file_calls_an_end_is_one(tmp_path: Path) -> None:
    write_model(tmp_path, generation={"eos_token_id": [3, 5, 7]})

    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 2
    assert read_facts(tmp_path, ServerConfig(model=str(tmp_path))).eos_token_ids == {3, 5, 7}
