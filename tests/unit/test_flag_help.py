"""What a newcomer sees of the flags: groups, common ones first, and what other servers' flags are called here."""

import subprocess
import sys

import pytest

from tandem.cli import main as cli
from tandem.cli import router, serve, up
from tandem.cli.flag_groups import GROUPS, group_of
from tandem.cli.flag_synonyms import ROUTER_SYNONYMS, SYNONYMS
from tandem.config import ServerConfig, flags
from tandem.server.router.config import RouterConfig


def parser() -> cli.Parser:
    made = cli.Parser(prog="tandem serve", allow_abbrev=False)
    serve.add_arguments(made)
    return made


def router_parser() -> cli.Parser:
    made = cli.Parser(prog="tandem router", allow_abbrev=False)
    router.add_arguments(made)
    return made


def test_help_shows_every_flag_once_in_its_group_and_the_common_ones_first() -> None:
    shown = parser().format_help()
    titles = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:3] == ["positional arguments", "options", "most used"]
    assert shown.startswith("usage: tandem serve MODEL [flags]\n")
    for name, field in flags():
        assert sum(line.startswith((f"  {name} ", f"  {name},", f"  {name}\n")) for line in shown.splitlines(True)) == 1
        assert shown.index(f"\n{group_of(field.name)}:\n") < shown.index(f"\n  {name}")


def test_groups_name_flags_that_are_there_each_once() -> None:
    known = {field.name for kind in (ServerConfig, RouterConfig) for _, field in flags(kind)}
    names = [name for group in GROUPS.values() for name in group]
    assert len(set(names)) == len(names)
    assert set(names) <= known


def test_a_router_has_groups_too() -> None:
    assert "\nmost used:\n  --host" in router_parser().format_help()


@pytest.mark.parametrize(("made", "synonyms"), [(parser(), SYNONYMS), (router_parser(), ROUTER_SYNONYMS)])
def test_synonyms_lead_to_flags_that_are_there_and_hide_none(made: cli.Parser, synonyms: dict[str, str]) -> None:
    known = {option for action in made._actions for option in action.option_strings}
    assert {text for text in synonyms.values() if text.startswith("-")} <= known
    assert not known & set(synonyms)


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        ("--max-model-len 100", ["unknown argument --max-model-len: here it is --context-length"]),
        ("--max-num-seqs=4", ["unknown argument --max-num-seqs: here it is --max-running-requests"]),
        ("-tp 2", ["unknown argument -tp: here it is --tp-size"]),
        ("--trust-remote-code", ["--trust-remote-code: not needed: code of a checkpoint is never run"]),
        ("--pagesize 3", ["unknown argument --pagesize; did you mean --page-size?"]),
        ("--xyzzy -5", ["unknown argument --xyzzy; see"]),
        ("more", ["unknown argument more; see"]),
        ("--num-speculative-tokens 3", ["--num-speculative-tokens: speculative decoding is not there"]),
        ("--load-format gguf", ["--load-format: there is no such flag: safetensors and GGUF are read"]),
        ("--disaggregation-ib-device mlx5_0", ["set UCX_NET_DEVICES", "--disaggregation-transfer-backend nixl"]),
        ("--block-size 3 --lora-paths x", ["here it is --page-size", "LoRA adapters are not served"]),
    ],
)
def test_all_that_is_unknown_is_told_in_one_line_with_its_name_here(
    words: str, hints: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse(["tandem/mini", *words.split()])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(hint in line for hint in hints)


def test_a_router_knows_what_its_flags_are_called_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        router_parser().parse(["--pd-disaggregation", "--prefill", "u", "--decode", "v", "--request-timeout-secs", "5"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--pd-disaggregation: not needed: every request goes to a --prefill and a --decode" in line
    assert "--request-timeout-secs: here it is --request-timeout" in line


def test_up_says_where_flags_of_servers_and_router_go(capsys: pytest.CaptureFixture[str]) -> None:
    made = cli.Parser(prog="tandem up", allow_abbrev=False)
    up.add_arguments(made)
    with pytest.raises(SystemExit) as ended:
        made.parse(["--tp", "2", "--max-model-len=9", "--policy", "cache_aware", "--host", "0.0.0.0", "--prefil", "2"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--tp: it goes into --server-flags" in line
    assert "--max-model-len: it goes into --server-flags" in line
    assert "--policy: it goes into --router-flags" in line
    assert "--host: all of them listen on loopback" in line
    assert "--prefil; did you mean --prefill?" in line


def test_a_command_that_is_run_as_a_module_knows_them_too() -> None:
    words = [sys.executable, "-m", "tandem.cli.main", "serve", "--model-path", "tandem/mini"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert "--model-path: the model is the first word: tandem serve MODEL" in done.stderr


def test_the_degree_of_tensor_parallelism_is_known_by_its_names_elsewhere() -> None:
    for name in ("--tp", "--tp-size", "--tensor-parallel-size"):
        assert parser().parse(["m", name, "2"]).tp_size == 2
