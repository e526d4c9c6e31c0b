"""One unified server as a user runs it: it serves, frees, drains, and every bad case is one line with nothing left."""

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from cluster import (
    REPLY_S,
    Cluster,
    HttpError,
    Server,
    child_named,
    children_of,
    cluster,
    eventually,
    is_open,
    is_running,
)

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
FOREVER = {"ignore_eos": True}
ROOT = Path(__file__).parents[2]
MINI = ROOT / "src" / "tandem" / "bundled" / "mini"
FLAGS_PAGE = ROOT / "docs" / "flags.md"
GIVEN = ("flight_record", "max_total_tokens", "max_running_requests", "allowed_origins")  # to `server`
FOUND_AT_START = ("port", "served_model_name", "dtype", "load_balance_method", "context_length", "page_size")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `server` records."""
    return tmp_path_factory.mktemp("flight")


@pytest.fixture(scope="module")
def server(record: Path) -> Iterator[Server]:
    flags = ["--flight-record", str(record), "--max-total-tokens", "2048", "--max-running-requests", "4"]
    flags += ["--allowed-origins", '["https://chat.example"]']
    with pytest.MonkeyPatch.context() as patch, cluster_with_numbers(patch, flags) as it:
        assert it.unified is not None
        yield it.unified


def cluster_with_numbers(patch: pytest.MonkeyPatch, flags: list[str]) -> AbstractContextManager[Cluster]:
    """A unified server whose log numbers its batches."""
    patch.setenv("SGLANG_LOG_FORWARD_ITERS", "true")
    return cluster(unified=True, flags=flags)


def run_tandem(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A `tandem` command that is expected to end soon."""
    return subprocess.run(
        [sys.executable, "-m", "tandem.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("tandem: error: ")]


def cached_tokens(server: Server, key: str, **fields: object) -> int:
    """What a user with this key is told of how much of a prompt was there already."""
    connection = http.client.HTTPConnection(server.host, server.member.port, timeout=REPLY_S)
    body = {"text": f"{PROMPT} {PROMPT}", "sampling_params": {"max_new_tokens": 1}} | fields
    connection.request("POST", "/generate", json.dumps(body), {"Authorization": f"Bearer {key}"})
    with connection.getresponse() as reply:
        assert reply.status == 200
        found: int = json.loads(reply.read())["meta_info"]["cached_tokens"]
        return found


def test_a_web_page_of_an_allowed_origin_streams_from_it(server: Server) -> None:
    connection = http.client.HTTPConnection(server.host, server.member.port, timeout=REPLY_S)
    body = json.dumps({"prompt": PROMPT, "stream": True, "max_tokens": 2})
    for origin, status in (("https://chat.example", 200), ("https://evil.example", 403)):
        connection.request("POST", "/v1/completions", body, {"Origin": origin, "Sec-Fetch-Site": "cross-site"})
        with connection.getresponse() as reply:
            assert reply.status == status
            assert reply.headers["Access-Control-Allow-Origin"] == (origin if status == 200 else None)
            assert (b"[DONE]" in reply.read()) == (status == 200)


def test_a_user_is_not_told_whether_another_has_sent_a_prompt(server: Server) -> None:
    assert cached_tokens(server, "mine", cache_salt="s") == 0
    assert cached_tokens(server, "mine", cache_salt="s") > 0
    for key, salt in (("yours", "s"), ("mine", None), ("yours", "mines"), ("min", "es"), ("mines", "")):
        assert cached_tokens(server, key, cache_salt=salt) == 0


def test_the_same_prompt_gives_the_same_tokens_alone_and_in_company(server: Server) -> None:
    alone = server.generate(PROMPT)["output_ids"]
    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.append(server.generate(PROMPT)["output_ids"])) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [alone] * 6


def test_a_client_that_leaves_frees_everything(server: Server) -> None:
    stream = server.stream(PROMPT, max_new_tokens=1500, sampling_params=FOREVER)
    assert stream.next() is not None
    assert not server.is_idle()
    stream.close()
    eventually(server.is_idle, what=server.state)


def test_a_client_that_offers_http_2_is_answered_in_http_1(server: Server) -> None:
    """As Java's client does with its first request. The body must not be lost over it."""
    connection = http.client.HTTPConnection(server.host, server.member.port, timeout=REPLY_S)
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"}
    for _ in range(2):
        connection.request("POST", "/generate", json.dumps({"text": "x"}), offer)
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["text"] != "") == (200, True)
    connection.close()


def test_a_prompt_that_does_not_fit_the_pool_is_a_400_and_the_server_goes_on(server: Server) -> None:
    with pytest.raises(HttpError) as refused:
        server.generate([5] * 3000)
    assert refused.value.status == 400
    assert refused.value.error["code"] == "context_length_exceeded"
    assert server.generate(PROMPT)["meta_info"]["path"] == "unified"


def test_more_requests_than_rows_all_get_their_tokens(server: Server) -> None:
    lengths: list[int] = []

    def ask(number: int) -> None:
        reply = server.generate([10 + number] * 40, max_new_tokens=20, sampling_params=FOREVER)
        lengths.append(len(reply["output_ids"]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [20] * 16
    eventually(server.is_idle, what=server.state)


def test_no_more_run_than_the_flag_says_and_the_others_wait(server: Server) -> None:
    sampling = {"max_new_tokens": 400, **FOREVER}
    requests = [server.open_stream([30 + number] * 20, sampling_params=sampling) for number in range(9)]

    def loads() -> tuple[int, int]:
        (load,) = server.get("/v1/loads")["loads"]
        return load["num_running_reqs"], load["num_waiting_reqs"]

    eventually(lambda: loads()[1] > 0, what=loads)
    assert max(loads()[0] for _ in range(20)) == 4
    for waiting in requests:
        waiting.close()
    eventually(server.is_idle, what=server.state)


def test_it_says_what_it_runs_and_a_request_to_copy_when_it_is_ready(server: Server) -> None:
    assert re.search(
        r"\bengine: products by .*; 1\.9M parameters in float32, context of 8192 tokens, KV for 2048$", server.log, re.M
    )
    (line,) = (line for line in server.log.splitlines() if line.startswith("curl "))
    words = shlex.split(line)
    url, body = next(word for word in words if "://" in word), words[words.index("-d") + 1]
    assert url.startswith(server.url)
    answer = server.call("POST", url.removeprefix(server.url), json.loads(body))
    assert answer["choices"][0]["message"]["content"]


def test_batches_are_logged_under_the_numbers_of_their_launch(server: Server) -> None:
    """The prompt of three chunks is under way twice at a time; at its end nothing comes after them."""
    assert_numbered(server)


def test_a_prompt_is_logged_by_what_was_computed_and_what_was_cached(server: Server) -> None:
    prompt, page = list(range(40, 440)) * 3, 16
    pattern = r"Prefill batch \[\d+\], #new-seq: \d+, #new-token: (\d+), #cached-token: (\d+)"

    def logged(after: int) -> list[int]:
        found = re.findall(pattern, server.log[after:])
        return [sum(map(int, column)) for column in zip(*found, strict=True)]

    for want in ([len(prompt), 0], [page, len(prompt) - page]):
        before = len(server.log)
        server.generate(prompt, max_new_tokens=1)
        eventually(lambda want=want, before=before: logged(before) == want, what=lambda before=before: logged(before))


def test_without_overlap_one_batch_is_launched_at_a_time_and_has_its_own_number(server: Server) -> None:
    stream = server.stream(PROMPT, max_new_tokens=1500, sampling_params=FOREVER)
    eventually(lambda: len(server.state()["window"]) == 2, what=server.state)
    stream.close()
    with pytest.MonkeyPatch.context() as patch, cluster_with_numbers(patch, ["--disable-overlap-schedule"]) as it:
        alone = it.unified
        assert alone is not None
        assert_numbered(alone)
        stream = alone.stream(PROMPT, max_new_tokens=8000, sampling_params=FOREVER)
        stream.next()
        assert {len(alone.state()["window"]) for _ in range(100)} <= {0, 1}
        stream.close()


def test_the_page_of_flags_has_those_of_the_command_and_the_defaults_of_a_server(server: Server) -> None:
    page = dict(re.findall(r"^\| `(--[\w-]+)[^|]*` \| `?([^|`]+)`? \|", FLAGS_PAGE.read_text(), re.MULTILINE))
    told = run_tandem("serve", "--help")
    assert set(re.findall(r"^  (--[\w-]+)", told.stdout, re.MULTILINE)) == set(page)
    info = server.get("/server_info")
    defaults = {name: default for flag, default in page.items() if (name := flag[2:].replace("-", "_")) in info}
    shown: dict[object, str] = {"None": "-", "[]": "-", "False": "off", "True": "on"}
    differ = {name for name, default in defaults.items() if shown.get(str(info[name]), str(info[name])) != default}
    assert differ == {*GIVEN, *FOUND_AT_START}
    assert {flag[2:].replace("-", "_") for flag in page} - set(defaults) == {"api_key", "admin_api_key"}


def test_flags_of_the_delayer_without_it_are_refused() -> None:
    ended = run_tandem("serve", "tandem/mini", "--prefill-delayer-max-delay-ms", "100")
    assert ended.returncode == 2
    assert "--enable-prefill-delayer" in "".join(error_lines(ended.stderr))


def assert_numbered(server: Server) -> None:
    """What it says alone: then no batch has prompts and decode rows, and two lines."""
    eventually(server.is_idle)
    before = len(server.log)
    server.generate(list(range(20, 420)) * 3, max_new_tokens=1)
    eventually(lambda: server.log.count("Prefill batch [", before) >= 3, what=lambda: server.log)
    server.generate(PROMPT, max_new_tokens=250, sampling_params=FOREVER)
    pattern = r"(Prefill|Decode) batch \[(\d+)\], #(?:new-seq|running-req): \d+, "
    eventually(lambda: server.log.count("Decode batch [", before) >= 2, what=lambda: server.log)
    assert ("Prefill", "1") in re.findall(pattern, server.log)
    numbers = [int(number) for _, number in re.findall(pattern, server.log[before:])]
    assert sorted(set(numbers)) == numbers


def test_the_node_process_runs_without_torch(server: Server) -> None:
    node = child_named(server.member.process.pid, "node.process")
    worker = child_named(server.member.process.pid, "worker_process")
    assert "libtorch" not in Path(f"/proc/{node}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{worker}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{server.member.process.pid}/maps").read_text()


def test_a_flight_record_of_the_live_server_replays_identically(server: Server, record: Path) -> None:
    server.generate(PROMPT)
    replayed = run_tandem("replay", str(record), "--json")
    document = json.loads(replayed.stdout)
    assert replayed.returncode == 0, replayed.stderr
    assert document["identical"]
    assert document["segments"][0]["steps"] > 20


def test_a_port_that_is_taken_is_one_line(server: Server) -> None:
    second = run_tandem("serve", "tandem/mini", "--port", str(server.member.port))
    assert second.returncode == 1
    (line,) = error_lines(second.stderr)
    assert f"port {server.member.port}" in line
    assert "--port" in line


def test_chats_are_rendered_by_the_template_that_was_given_on_both_halves_of_a_pair(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}")
    with cluster(prefills=1, decodes=1, flags=["--chat-template", str(tmp_path / "own.jinja")]) as it:
        assert it.router is not None
        usual = {"model": "tandem/mini", "max_tokens": 8, "temperature": 0}
        chat = it.router.call(
            "POST", "/v1/chat/completions", usual | {"messages": [{"role": "user", "content": PROMPT}]}
        )
        plain = it.router.call("POST", "/v1/completions", usual | {"prompt": f"<user> {PROMPT}"})
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_a_template_that_cannot_be_compiled_is_one_line_and_leaves_nothing_running() -> None:
    (port,) = free_ports(1)
    served = run_tandem("serve", "tandem/mini", "--port", str(port), "--chat-template", "{% for m in messages %}")
    assert served.returncode == 1
    (line,) = error_lines(served.stderr)
    assert "--chat-template" in line
    assert not is_open(port)


@pytest.mark.parametrize(
    "missing",
    [
        "config.json",
        "weights",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("tokenizer.json", "model.safetensors", "architecture")),
    ],
)
def test_a_broken_model_directory_is_one_line_and_leaves_nothing_running(missing: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MINI, model)
    if missing == "architecture":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    elif missing == "weights":
        (model / "model.safetensors").write_bytes(b"\0" * 100)
    else:
        (model / missing).unlink()
    (port,) = free_ports(1)
    served = run_tandem("serve", str(model), "--port", str(port))
    assert served.returncode == 1
    (line,) = error_lines(served.stderr)
    assert {"architecture": "Mamba", "weights": "model.safetensors"}.get(missing, missing) in line
    assert "Traceback" not in served.stderr
    assert not is_open(port)


def test_a_bootstrap_port_that_is_taken_is_one_line(server: Server) -> None:
    taken = str(server.member.port)
    words = ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", taken]
    second = run_tandem("serve", "tandem/mini", "--port", "0", *words)
    assert second.returncode == 1
    (line,) = error_lines(second.stderr)
    assert f"port {taken}" in line
    assert "--disaggregation-bootstrap-port" in line


def start_alone(folder: Path) -> tuple[Fleet, Server]:
    """A unified server that may still load its model."""
    (port,) = free_ports(1)
    fleet = Fleet(folder, engines=1)
    return fleet, Server(fleet.start("unified", serve_words("tandem/mini", port), port=port))


def test_while_the_model_is_loaded_health_says_503_and_sigterm_lets_a_running_stream_finish(tmp_path: Path) -> None:
    fleet, server = start_alone(tmp_path)
    with fleet:
        eventually(lambda: is_open(server.member.port))
        assert server.open("GET", "/health").status == 503
        with pytest.raises(HttpError) as early:
            server.generate(PROMPT)
        assert early.value.status == 503
        fleet.wait_ready(timeout_s=60)
        assert server.open("GET", "/health").status == 200
        drains_when_it_has_finished(server)


def drains_when_it_has_finished(server: Server) -> None:
    """And refuses what comes after the signal."""
    process = server.member.process
    stream = server.stream(PROMPT, max_new_tokens=300, sampling_params=FOREVER)
    assert stream.next() is not None
    children = children_of(process.pid)
    process.send_signal(signal.SIGTERM)
    eventually(lambda: server.open("GET", "/health").status == 503)
    with pytest.raises(HttpError) as refused:
        server.generate(PROMPT)
    assert refused.value.status == 503
    assert len(stream.rest()[-1]["output_ids"]) == 300
    assert process.wait(20) == 0
    assert not any(map(is_running, children))


def test_sigterm_while_the_model_is_loaded_ends_it_cleanly(tmp_path: Path) -> None:
    fleet, server = start_alone(tmp_path)
    with fleet:
        process = server.member.process
        eventually(lambda: is_open(server.member.port))
        assert server.open("GET", "/health").status == 503
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert not any(map(is_running, children))
        assert "Traceback" not in server.log


def test_who_finds_no_room_is_counted_though_nothing_of_it_is_read() -> None:
    with cluster(unified=True, flags=["--max-running-requests", "1", "--max-queued-requests", "1"]) as it:
        assert it.unified is not None
        server = it.unified
        running = server.stream(PROMPT, max_new_tokens=8000, sampling_params=FOREVER)
        assert running.next() is not None
        queued = server.open_stream(PROMPT)

        def page() -> str:
            with server.open("GET", "/metrics") as reply:
                return reply.read().decode()

        eventually(lambda: re.search(r"sglang:num_queue_reqs{.*} 1.0", page()))
        with pytest.raises(HttpError) as refused:
            server.generate(PROMPT)
        assert (refused.value.status, refused.value.error["code"]) == (503, "busy")
        assert 'requests_failed_total{cause="busy",engine_type="unified"' in page()
        running.close()
        queued.close()


def test_a_worker_that_dies_ends_its_requests_with_a_cause_and_the_server() -> None:
    with cluster(unified=True) as it:
        assert it.unified is not None
        server, process = it.unified, it.unified.member.process
        stream = server.stream(PROMPT, max_new_tokens=8000, sampling_params=FOREVER)
        assert stream.next() is not None
        node = child_named(process.pid, "node.process")
        os.kill(child_named(process.pid, "worker_process"), signal.SIGKILL)
        assert stream.rest()[-1]["error"]["code"] == "worker_lost"
        assert process.wait(10) == 1
        (line,) = error_lines(server.log)
        assert "worker process was killed by signal SIGKILL" in line
        assert not is_running(node)


def test_children_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Nobody has told them anything yet: it is the kernel that ends them, whatever they are doing."""
    fleet, server = start_alone(tmp_path)
    with fleet:
        process = server.member.process
        eventually(lambda: len(children_of(process.pid)) == 2)
        children = children_of(process.pid)
        process.kill()
        process.wait()
        eventually(lambda: not any(map(is_running, children)))


def test_a_second_signal_ends_it_at_once(server: Server) -> None:
    """The last test of this server."""
    process = server.member.process
    stream = server.stream(PROMPT, max_new_tokens=1500, sampling_params=FOREVER)
    assert stream.next() is not None
    children = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    eventually(lambda: server.open("GET", "/health").status == 503)
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 1
    eventually(lambda: not any(map(is_running, children)))
