"""What chat, eval and bench compute by themselves; how they talk to a server is in e2e_cpu/test_router_clients.py."""

import argparse
import itertools
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import httpx
import pytest

from raw_http import Handler, handling
from tandem.cli import bench, client, eval, router
from tandem.cli import main as cli
from tandem.cli.client import (
    Choice,
    ServerTrouble,
    StreamChunk,
    base_url,
    chunks_of,
    client_options,
    raise_for_status,
    trouble,
)
from tandem.cli.failure import CommandFailed
from tandem.core.router.circuit_breaker import BreakerSettings
from tandem.core.router.routing import PolicySettings
from tandem.core.settings import Role
from tandem.core.values import SECOND
from tandem.server.router.config import make_worker


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7\n#### 7", 7),
        ("#### 1\nno, wait\n#### 2", 2),
        ("#### 72,000", 72000),
        ("#### $18.50.", Decimal("18.5")),
        ("####-3", -3),
        ("#### .5", Decimal("0.5")),
        ("the answer is 7", None),
        ("#### seven", None),
        ("#### 7\n####", None),
        ("", None),
    ],
)
def test_the_number_after_the_last_four_hashes_counts(text: str, number: Decimal | None) -> None:
    assert eval.final_number(text) == number


def test_both_forms_of_a_data_set_are_read(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text('{"question": "a", "answer": "1,024"}\n\n{"question": "b", "answer": "x = 4\\n#### 42"}\n')
    assert [problem.answer for problem in eval.read_problems(str(file))] == [1024, 42]


def test_the_bundled_questions_all_have_a_number() -> None:
    assert len(eval.read_problems(None)) >= 100


def test_a_data_set_that_is_wrong_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    for text, reason in (
        ('{"question": "a", "answer": "1"}\n{"question": "b"}', ":2"),
        ('{"question": "a", "answer": "one"}', "not a number"),
        ('{"question": "a", "answer": NaN}', "not a number"),
        ('{"question": "a", "answer": "sNaN"}', "not a number"),
        ("nope", ":1"),
        ("", "no question"),
    ):
        file.write_text(text)
        with pytest.raises(CommandFailed, match=reason) as raised:
            eval.read_problems(str(file))
        assert raised.value.is_wrong_usage


def test_a_failed_request_is_neither_right_nor_unanswered() -> None:
    problem = eval.MathProblem("q", Decimal(4))
    results = [eval.Result(problem, "#### 4"), eval.Result(problem, "4"), eval.Result(problem, failure="503")]
    report = eval.make_report(results, "m", 1.0)
    assert (report["correct"], report["unanswered"], report["failed"]) == (1, 1, 1)
    assert report["accuracy"] == pytest.approx(1 / 3)


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    ordered = [float(value) for value in range(101)]
    assert bench.percentile(ordered, 99) == 99
    assert bench.percentile([1.0, 2.0], 50) == 1.5
    assert bench.percentile([3.0], 99) == 3.0
    assert bench.summary([]) is None


def test_arrivals_are_a_seeded_poisson_process() -> None:
    times = bench.arrival_times(random.Random(1), 5.0, 4000)
    assert times == bench.arrival_times(random.Random(1), 5.0, 4000)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.1)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.2)


def test_the_report_of_a_load_tells_first_token_gaps_and_rates() -> None:
    samples = [
        bench.RequestTimings(0.0, pieces=[0.1, 0.2, 0.4], ended=0.5, input_tokens=10, output_tokens=3, path="remote")
    ]
    samples.append(bench.RequestTimings(0.0, failure="503: busy"))
    args = argparse.Namespace(url="u", rate=None, concurrency=2, seed=0)
    report = bench.make_report(args, "m", samples, 2.0)
    assert (report["completed"], report["failed"], report["failures"]) == (1, 1, {"503: busy": 1})
    assert report["ttft_ms"]["p50"] == 100
    assert report["itl_ms"]["max"] == 200
    assert report["tpot_ms"]["mean"] == 200
    assert report["e2e_ms"]["p99"] == 500
    assert report["output_tokens_per_second"] == 1.5
    assert "path: remote 1" in bench.report_text(report)


def test_a_stream_is_read_up_to_done_and_its_errors_are_told() -> None:
    lines = ['data: {"choices": [{"text": "a"}]}', "", ": comment", "data:[DONE]", 'data: {"choices": []}']
    assert list(chunks_of(iter(lines))) == [StreamChunk(choices=[Choice(text="a")])]
    with pytest.raises(ServerTrouble, match="broke off"):
        list(chunks_of(iter(['data: {"choices": []}'])))
    with pytest.raises(ServerTrouble, match="deadline_exceeded: no token"):
        list(chunks_of(iter(['data: {"error": {"code": "deadline_exceeded", "message": "no token"}}'])))


@pytest.mark.parametrize(
    "chunk",
    [
        *("5", "[]", "[" * 20_000, '{"new": ' + "[" * 20_000 + "]" * 20_000 + "}", "9" * 5_000, '{"usage": []}'),
        *(f'{{"usage": {{"completion_tokens": {number}}}}}' for number in ("9" * 400, "-5")),
        *('{"choices": 5}', '{"choices": [[]]}', '{"choices": [{"text": 5}]}', '{"choices": [{"text": "\\ud800"}]}'),
    ],
)
def test_a_stream_of_another_shape_is_trouble_and_no_traceback(chunk: str) -> None:
    with pytest.raises(ServerTrouble, match="cannot be read"):
        list(chunks_of(iter([f"data: {chunk}", "data: [DONE]"])))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "too long", "code": "x"}}', "400: x: too long"),
        (b'{"message": "flat"}', "400: flat"),
        (b'{"error": "plain"}', "400: plain"),
        (b"<html>", "400: <html>"),
        (b"", "400: no explanation"),
    ],
)
def test_error_bodies_of_any_dialect_become_one_line(body: bytes, words: str) -> None:
    with pytest.raises(ServerTrouble) as raised:
        raise_for_status(400, body)
    assert str(raised.value) == words


def test_who_is_asked_for_a_key_is_told_how_to_give_one() -> None:
    with pytest.raises(ServerTrouble) as raised:
        raise_for_status(401, b'{"error":{"code":"unauthorized","message":"the key is missing"}}')
    remedy = "give one by --api-key, --api-key-file or TANDEM_API_KEY"
    assert str(raised.value) == f"401: unauthorized: the key is missing; {remedy}"


def test_urls_are_taken_as_users_write_them() -> None:
    assert base_url("127.0.0.1:8000/v1/") == "http://127.0.0.1:8000"
    assert base_url("https://x/v1") == "https://x"


@pytest.mark.parametrize("url", ["", "http://", "ftp://a:1", "a:b", "http://[::1", "http://a..b:1", "a" * 64])
def test_what_is_no_url_is_wrong_usage(url: str) -> None:
    with pytest.raises(CommandFailed, match="is not the URL of a server") as raised:
        client_options(argparse.Namespace(url=url, api_key=None, api_key_file=None))
    assert raised.value.is_wrong_usage


def test_an_api_key_that_no_header_can_carry_is_wrong_usage() -> None:
    for key in ("schlüssel", "two\nlines"):
        with pytest.raises(CommandFailed, match="--api-key") as raised:
            client_options(argparse.Namespace(url="127.0.0.1:1", api_key=key, api_key_file=None))
        assert raised.value.is_wrong_usage


def test_a_server_that_is_not_there_is_told_with_the_two_places_where_one_may_be() -> None:
    told = str(trouble(httpx.ConnectError("refused"), "http://127.0.0.1:30000"))
    assert "`tandem serve tandem/mini`" in told
    assert "`tandem up`: http://127.0.0.1:8000" in told


@contextmanager
def listening(status: int, body: bytes = b"") -> Iterator[str]:
    """The address of something that answers everybody with this status."""

    class Listening(Handler):
        def do_GET(self) -> None:
            self.say(body, status)

        def do_POST(self) -> None:
            self.read_body()
            self.say(body, status)

    with handling(Listening) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("words", ["eval --num 1", "bench --num-prompts 1 --warmup 0"])
def test_what_a_server_says_of_a_failure_is_not_obeyed_by_the_terminal(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(500, b'{"error": {"message": "\\u001b]0;mine\\u0007gone"}}') as url:
        assert cli.main([*words.split(), "--url", url, "--model", "m"]) == 1
    printed = capsys.readouterr()
    assert "500: gone" in printed.out
    assert "\x1b" not in printed.out + printed.err


@pytest.mark.parametrize("words", ["eval --num 1", "bench --num-prompts 1 --warmup 0"])
def test_a_server_that_takes_a_question_and_says_nothing_is_not_waited_for_for_ever(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "SILENT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert cli.main([*words.split(), "--url", url, "--model", "m"]) == 1
    printed = capsys.readouterr()
    assert "ReadTimeout" in printed.out + printed.err


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A proxy at which nobody listens, for everything."""
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    return monkeypatch


@pytest.mark.parametrize("url", ["http://localhost:1", "127.0.0.2:1", "http://[::1]:1"])
def test_what_is_on_this_machine_is_asked_without_a_proxy(proxied: pytest.MonkeyPatch, url: str) -> None:
    assert client.proxy_for(url) is None


def test_a_server_elsewhere_is_asked_by_the_proxy_unless_it_needs_none(proxied: pytest.MonkeyPatch) -> None:
    proxied.setenv("http_proxy", "user:word@proxy:1")
    proxied.setenv("NO_PROXY", "[::1], 10.1.0.0/16,.corp.example")
    assert client.proxy_for("http://10.2.3.4:8000") == "http://user:word@proxy:1"
    assert client.proxy_for("https://10.2.3.4:8000") == "http://127.0.0.1:9"
    assert client.proxy_for("http://10.1.3.4:8000") is None
    assert client.proxy_for("tandem.corp.example") is None


@pytest.mark.parametrize(
    "words",
    ["eval --num 1 --model m", "bench --num-prompts 1 --model m", "top --once", "chat", "bench --num-prompts 1"],
)
def test_a_proxy_that_is_in_the_way_is_told(
    proxied: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert cli.main([*words.split(), "--url", "http://127.0.0.2.invalid"]) == 1
    printed = capsys.readouterr()
    assert "proxy of the environment" in printed.out + printed.err
    assert "NO_PROXY" in printed.out + printed.err


@pytest.mark.parametrize(
    "words", ["eval --num 1 --model m", "bench --num-prompts 1 --warmup 0 --model m", "top --once"]
)
def test_a_proxy_is_what_is_asked(proxied: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str) -> None:
    with listening(502, b'{"error": {"message": "the proxy says no"}}') as proxy:
        proxied.setenv("ALL_PROXY", proxy)
        assert cli.main([*words.split(), "--url", "http://server.invalid"]) == 1
    printed = capsys.readouterr()
    assert "502: the proxy says no" in printed.out + printed.err


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:9", "ftp://127.0.0.1:9"])
def test_a_proxy_of_a_kind_that_is_not_known_is_one_line(
    proxied: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], proxy: str
) -> None:
    proxied.setenv("ALL_PROXY", proxy)
    assert cli.main(["bench", "--num-prompts", "1", "--url", "http://server.invalid"]) == 1
    assert "cannot be used" in capsys.readouterr().err


def unnamed(**given: str) -> argparse.Namespace:
    return argparse.Namespace(**({"url": None, "api_key": None, "api_key_file": None, "model": "m"} | given))


def test_a_server_that_nobody_named_is_found_where_it_answers_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    for status in (200, 401):
        with listening(404) as web_server, listening(status) as found:
            monkeypatch.setattr(client, "LIKELY_URLS", (web_server, found))
            args = unnamed()
            client.served_model(args)
            assert args.url == found
    with pytest.raises(ServerTrouble, match=f"no server answers at {web_server} or {found}; start one with"):
        client.served_model(unnamed())


def test_the_variables_of_openai_name_the_server_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://there/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    args = unnamed()
    client.served_model(args)
    assert client_options(args)["base_url"] == "http://there"
    assert client_options(args)["headers"] == {"authorization": "Bearer theirs"}
    for given in ({"api_key": "mine"}, {"url": "http://here", "api_key": "mine"}):
        args = unnamed(**given)
        client.served_model(args)
        assert client_options(args)["headers"] == {"authorization": "Bearer mine"}
    assert args.url == "http://here"
    monkeypatch.setenv("TANDEM_API_KEY", "ours")
    args = unnamed()
    client.served_model(args)
    assert client_options(args)["headers"] == {"authorization": "Bearer ours"}


def test_a_key_of_openai_is_not_told_to_who_only_listens_where_a_server_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    with listening(401) as found:
        monkeypatch.setattr(client, "LIKELY_URLS", (found,))
        args = unnamed()
        client.served_model(args)
        assert client_options(args)["headers"] == {}


def test_router_flags_name_prefills_with_and_without_a_bootstrap_port() -> None:
    words = "--prefill http://a:1 8998 --prefill b:2 none --prefill http://[::1]:3 --decode http://d:4/ --retries 1"
    config = router.make_config(_parse(words.split()))
    assert [worker.bootstrap_port for worker in config.workers] == [8998, None, None, None]
    assert [worker.host for worker in config.workers] == ["a", "b", "[::1]", "d"]
    assert [worker.role for worker in config.workers] == [Role.PREFILL] * 3 + [Role.DECODE]
    assert config.workers[3].url == "http://d:4"
    assert config.settings().request.retries == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--decode http://d:4", "at least one --prefill"),
        ("--prefill http://a:1", "at least one --decode"),
        ("--prefill http://a:1 x --decode http://d:4", "x is not a port"),
        ("--prefill http://a:1 1 2 --decode http://d:4", "not also 2"),
        ("--prefill http://a --decode http://d:4", "names no port"),
        ("--prefill http://a:1 --decode http://a:1", "named twice"),
        ("--prefill http://a:1 --decode http://b:1 --request-timeout 604801", "timeouts are at most 604800 seconds"),
        ("--prefill http://a:1 --decode http://d:4 --retries -1", "--retries"),
        *(
            (f"--prefill http://a:1 --decode http://d:4 {words}", "name one")
            for words in ("--allow-credentials", "--allowed-methods GET", "--allowed-headers x-a")
        ),
        ("--prefill http://a:1 --decode http://d:4 --port 70000", "--port takes 0 to 65535"),
        ("--prefill http://a:1 --decode http://d:4 --fd -1", "--fd takes the number"),
        ("--prefill http://a:1 --decode http://d:4 --drain-timeout -1", "--drain-timeout must not be negative"),
        ("--prefill http://a:99999 --decode http://d:4", "no valid port"),
        ("--prefill http://[::1 --decode http://d:4", r"http://\[::1 is not the URL of a server"),
        ("--prefill http://a:1 --decode http://d:4 --cache-threshold 0.5", "--cache-threshold: only with a policy"),
        (
            "--prefill http://a:1 --decode http://d:4 --prefill-policy least_load --decode-policy least_load "
            "--policy cache_aware",
            "--policy does nothing",
        ),
        ("--prefill http://a:1 --decode http://d:4 --policy cache_aware --cache-threshold 2", "takes 0 to 1"),
        ("--prefill http://a:1 --decode http://d:4 --cb-failure-threshold 0", "must be at least 1"),
        ("--prefill http://a:1 --decode http://d:4 --cb-timeout-duration-secs 0", "must be positive"),
        *(
            (f"--prefill http://a:1 --decode http://d:4 --{name} 1e300", f"--{name}.* at most 604800")
            for name in ("health-check-interval", "cb-timeout-duration-secs", "cb-window-duration-secs")
        ),
        (
            "--prefill http://a:1 --decode http://d:4 --cb-success-threshold 3 --disable-circuit-breaker",
            "--cb-success-threshold: not with",
        ),
        ("--prefill http://a:1 --decode http://d:4 --policy cache_aware --max-tree-size 0", "must be positive"),
        ("--prefill http://a:1 --decode http://d:4 --policy cache_aware --balance-rel-threshold 0.5", "at least 1"),
    ],
)
def test_a_router_that_cannot_be_says_why(words: str, reason: str) -> None:
    with pytest.raises(CommandFailed, match=reason) as raised:
        router.make_config(_parse(words.split()))
    assert raised.value.is_wrong_usage


def test_pages_of_other_sites_may_bring_credentials_to_a_router_that_names_them() -> None:
    words = "--prefill http://a:1 --decode http://d:4 --allowed-origins https://a.example --allow-credentials"
    config = router.make_config(_parse(words.split()))
    assert (config.allowed_origins, config.allow_credentials) == (("https://a.example",), True)


@pytest.mark.parametrize("host", ["a..b", "256.1.1.1"])
def test_a_router_that_cannot_listen_says_why(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.logs, "set_up", lambda *_, **__: None)
    words = f"--prefill http://a:1 --decode http://d:4 --port 0 --host {host}"
    with pytest.raises(CommandFailed, match=r"^cannot listen on .*:0: (?!Unknown error)"):
        router.run(_parse(words.split()))


def test_router_policies_are_told_by_role_with_their_numbers() -> None:
    words = "--prefill http://a:1 --decode http://d:4 --policy power_of_two --prefill-policy cache_aware"
    numbers = "--cache-threshold 0.5 --balance-abs-threshold 3 --balance-rel-threshold 2 --max-tree-size 1000"
    settings = router.make_config(_parse([*words.split(), *numbers.split()])).settings()
    assert settings.prefill_policy == PolicySettings("cache_aware", 0.5, 3, 2.0, 8)
    assert settings.decode_policy.name == "power_of_two"


def test_the_numbers_of_the_circuit_breaker_reach_the_core() -> None:
    words = "--prefill http://a:1 --decode http://d:4 --cb-failure-threshold 4 --cb-success-threshold 2"
    seconds = "--cb-timeout-duration-secs 0.5 --cb-window-duration-secs 7"
    breaker = router.make_config(_parse([*words.split(), *seconds.split()])).settings().breaker
    assert breaker == BreakerSettings(4, 2, SECOND // 2, 7 * SECOND)
    off = router.make_config(_parse(["--prefill", "http://a:1", "--decode", "http://d:4", "--disable-circuit-breaker"]))
    assert off.settings().breaker is None


@pytest.mark.parametrize(
    "url", ["http://a:1?x=1", "http://a b:1", "http://a\0b:1", "http://a:1/\0", "http://xn--:1", "http://\uff21:1"]
)
def test_what_nobody_can_be_asked_at_is_no_worker(url: str) -> None:
    with pytest.raises(ValueError, match="not the URL"):
        make_worker(0, Role.DECODE, url)


@pytest.mark.parametrize("url", ["http://a:1/p%20q", "http://a_b.c:1", "https://m\xfcnchen:1", "http://[FE80::1]:1"])
def test_what_can_be_asked_is_one(url: str) -> None:
    assert make_worker(0, Role.DECODE, url).url == url.lower()


def test_no_worker_listens_at_port_0() -> None:
    with pytest.raises(ValueError, match="no valid port"):
        make_worker(0, Role.DECODE, "http://a:0")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    return parser.parse_args(words)
