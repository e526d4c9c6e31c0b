"""Halves that do not fit, and writes that nobody may make: one clear refusal, and both servers live on."""

import asyncio
import http.client
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    MODEL,
    SECRET,
    START_S,
    Cluster,
    HttpError,
    Server,
    Stream,
    bootstrap_port,
    eventually,
    halves,
    secret_flags,
)
from safetensors.numpy import load_file, save_file

import tandem
from tandem.cli.failure import CommandFailed
from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports
from tandem.membership import ClusterSecret, user_secret
from tandem.server.api.cluster_auth import signed_write

MINI = Path(tandem.__file__).parent / "bundled" / "mini"
PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
SOON_S = 10.0  # until prefill's half has ended, long before its deadline
FULL_WITH_TWO = ("--max-running-requests", "1", "--max-queued-requests", "1")


FLAGS = ("--page-size", "16", "--dtype", "float32"), ("--page-size", "32", "--dtype", "bfloat16")
DIFFERENCES = "dtype is float32 at prefill and bfloat16 at decode; page_size is 16 at prefill and 32 at decode"


def test_another_page_size_is_refused_with_both_values_and_both_servers_live(tmp_path: Path) -> None:
    with halves(tmp_path, *FLAGS) as (prefill, decode):
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 31}
        prefill_half = prefill.open_stream(PROMPT, timeout=20, **pair)
        began = time.monotonic()
        with pytest.raises(HttpError) as refused:
            decode.generate(PROMPT, timeout=20, **pair)
        assert time.monotonic() - began < 10
        error = refused.value.error
        assert (refused.value.status, error["code"], error["retryable"]) == (502, "layout_mismatch", True)
        assert DIFFERENCES in error["message"]
        told = prefill_half.getresponse().read()
        assert b"layout_mismatch" in told, "prefill ends its half and says why"
        assert DIFFERENCES.encode() in told
        prefill_half.close()
        for server in (prefill, decode):
            eventually(server.is_idle, what=server.state)
            with server.open("GET", "/ready") as reply:
                assert reply.status == 200
        assert len(decode.generate(PROMPT, max_new_tokens=3)["output_ids"]) == 3


def test_weights_that_differ_in_one_element_and_a_promise_of_one_side_only_are_refused_by_name(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(MINI, changed)
    tensors = load_file(changed / "model.safetensors")
    weight = tensors["model.layers.2.mlp.down_proj.weight"]
    weight[96, 256] += 2.0**-20
    save_file(tensors, changed / "model.safetensors")
    with halves(tmp_path, ("--deterministic",), (), decode_model=str(changed)) as (prefill, decode):
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 33}
        prefill_half = prefill.open_stream(PROMPT, timeout=20, **pair)
        with pytest.raises(HttpError) as refused:
            decode.generate(PROMPT, timeout=20, **pair)
        prefill_half.close()
    error = refused.value.error
    assert (refused.value.status, error["code"]) == (502, "layout_mismatch")
    named = [part.split(" is ")[0].split(": ")[-1] for part in error["message"].split("; ")]
    assert named == ["deterministic", "weights"]
    assert "deterministic is on, " in error["message"]


def test_a_half_that_prefill_refuses_at_its_door_is_told_to_decode_which_computes_the_prompt(common: Cluster) -> None:
    prefill, decode = common.prefills[0], common.decodes[0]
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill)}
    held = prefill.open_stream(PROMPT, timeout=60, rid="twice", bootstrap_room=41, **pair)
    assert held.getresponse().status == 200
    with pytest.raises(HttpError) as refused:
        prefill.generate(PROMPT, rid="twice", bootstrap_room=42, **pair)
    assert (refused.value.status, refused.value.error["code"]) == (409, "duplicate_rid")
    answer = decode.generate(PROMPT, timeout=20, bootstrap_room=42, **pair)
    assert answer["meta_info"]["path"] == "fallback"
    held.close()
    eventually(prefill.is_idle, what=prefill.state)


def test_who_computes_the_prompt_of_another_says_why(common: Cluster) -> None:
    """Of a wrong port nobody would know but by the time that it takes."""
    decode, nobody = common.decodes[0], free_ports(1)[0]
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": nobody, "bootstrap_room": 57}
    assert decode.generate(PROMPT, timeout=20, rid="astray", **pair)["meta_info"]["path"] == "fallback"
    (line,) = [each for each in decode.log.splitlines() if "request astray" in each]
    assert "path=fallback" in line
    assert f"127.0.0.1:{nobody}" in line
    assert "refused" in line


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        pytest.param({"rid": "twice"}, (409, "duplicate_rid"), id="a name in use"),
        pytest.param({"data_parallel_rank": 9}, (400, "invalid_value"), id="a DP rank that is not there"),
    ],
)
def test_a_half_that_decode_refuses_at_its_door_ends_that_of_prefill_though_nobody_stands_between(
    common: Cluster, fields: dict[str, Any], refusal: tuple[int, str]
) -> None:
    """Both were sent directly; prefill would wait for a minute."""
    prefill, decode = common.prefills[0], common.decodes[0]
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 43}
    held = decode.open_stream(PROMPT, rid="twice", sampling_params={"ignore_eos": True, "max_new_tokens": 4000})
    assert held.getresponse().status == 200
    half = prefill.stream(PROMPT, timeout=60, **pair)
    eventually(lambda: prefill.state()["rooms"], what=prefill.state)
    began = time.monotonic()
    with pytest.raises(HttpError) as refused:
        decode.generate(PROMPT, **fields, **pair)
    assert (refused.value.status, refused.value.error["code"]) == refusal
    assert half.rest()[-1]["error"]["code"] == "peer_aborted"
    assert time.monotonic() - began < SOON_S
    held.close()
    for server in (prefill, decode):
        eventually(server.is_idle, what=server.state)


def test_a_prompt_that_is_too_long_for_decode_alone_ends_the_half_of_prefill_though_nobody_stands_between(
    tmp_path: Path,
) -> None:
    """Prefill would wait for a minute; it believes who knows its prompt, and so its reader is told why."""
    with halves(tmp_path, (), ("--context-length", "24")) as (prefill, decode):
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 47}
        words = [*range(100, 130)]
        half = prefill.stream(words, timeout=60, **pair)
        eventually(lambda: prefill.state()["rooms"], what=prefill.state)
        began = time.monotonic()
        with pytest.raises(HttpError) as refused:
            decode.generate(words, **pair)
        assert (refused.value.status, refused.value.error["code"]) == (400, "context_length_exceeded")
        told = half.rest()[-1]["error"]
        assert time.monotonic() - began < SOON_S
        assert told["code"] == "peer_aborted"
        assert refused.value.error["message"] in told["message"]
        for server in (prefill, decode):
            eventually(server.is_idle, what=server.state)


def test_a_half_that_decode_has_no_room_for_ends_that_of_prefill_though_nobody_stands_between(tmp_path: Path) -> None:
    """However full a half's server is, it reads whose half it refuses: prefill would wait for a minute."""
    with halves(tmp_path, (), FULL_WITH_TWO) as (prefill, decode):
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 53}
        running, queued = fill(decode)
        half = prefill.stream(PROMPT, timeout=60, **pair)
        eventually(lambda: prefill.state()["rooms"], what=prefill.state)
        began = time.monotonic()
        with pytest.raises(HttpError) as refused:
            decode.generate(PROMPT, **pair)
        assert (refused.value.status, refused.value.error["code"]) == (503, "queue_full")
        assert half.rest()[-1]["error"]["code"] == "peer_aborted"
        assert time.monotonic() - began < SOON_S
        for held in (running, queued):
            held.close()
        for server in (prefill, decode):
            eventually(server.is_idle, what=server.state)


def test_a_half_that_prefill_has_no_room_for_is_told_to_decode_which_computes_the_prompt(tmp_path: Path) -> None:
    with halves(tmp_path, (*FULL_WITH_TWO, "--optimistic-prefill-policy", "off"), ()) as (prefill, decode):
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill)}
        waiting = prefill.open_stream(PROMPT, timeout=60, bootstrap_room=54, **pair)
        eventually(lambda: prefill.state()["rooms"], what=prefill.state)
        half_sent = http.client.HTTPConnection("127.0.0.1", prefill.member.port)
        half_sent.putrequest("POST", "/generate")
        half_sent.putheader("Content-Length", "100")
        half_sent.endheaders()
        refused = prefill.generate(PROMPT, bootstrap_room=55, **pair)
        assert refused["error"]["code"] == "queue_full", "which is behind a head that is sent early"
        answer = decode.generate(PROMPT, timeout=20, bootstrap_room=55, **pair)
        assert answer["meta_info"]["path"] == "fallback"
        for held in (waiting, half_sent):
            held.close()
        for server in (prefill, decode):
            eventually(server.is_idle, what=server.state)


def fill(server: Server) -> tuple[Stream, http.client.HTTPConnection]:
    """One that runs, and one that waits for it."""
    running = server.stream(PROMPT, max_new_tokens=4000, sampling_params={"ignore_eos": True})
    assert running.next() is not None
    queued = server.open_stream(PROMPT)
    eventually(lambda: server.metric("sglang:num_queue_reqs") == 1, what=server.state)
    return running, queued


def call(port: int, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def written(port: int, method: str, path: str, body: Any, secret: bytes) -> tuple[int, bytes]:
    sent = json.dumps(body).encode()
    wrote = signed_write(ClusterSecret(secret), "127.0.0.1", port, method=method, target=path, body=sent)
    answer = asyncio.run(wrote)
    return answer.status, answer.body


def test_nobody_can_take_over_the_route_of_a_prefill(tmp_path: Path) -> None:
    secret = secret_flags(tmp_path)
    with halves(tmp_path, ("--host", "0.0.0.0", *secret), secret) as (prefill, decode):
        port = bootstrap_port(prefill)
        _, before = call(port, "GET", "/route", None, {})
        forged = json.loads(before) | {"control_host": "203.0.113.9"}
        forged["incarnation"]["id"] = "f" * 32
        for status, answer in (
            call(port, "PUT", "/route", forged, {}),
            written(port, "PUT", "/route", forged, b"another secret, as long as it"),
        ):
            assert (status, json.loads(answer)["error"]["code"]) == (401, "unsigned")
        status, answer = written(port, "PUT", "/route", forged, SECRET)
        assert (status, json.loads(answer)["error"]["param"]) == (400, "dp_rank"), "not even another member can"
        assert call(port, "GET", "/route", None, {})[1] == before
        room = {"bootstrap_room": 5, "dp_rank": 0}
        assert written(port, "POST", "/register_dp_rank", room, SECRET) == (200, b"OK")
        assert call(port, "POST", "/query_dp_ranks", {"bootstrap_rooms": [5, 6]}, {})[1] == b'{"5":0}'
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 32}
        prefill_half = prefill.open_stream(PROMPT, timeout=20, **pair)
        assert decode.generate(PROMPT, timeout=20, **pair)["meta_info"]["path"] == "remote"
        prefill_half.close()


def test_on_loopback_a_write_proves_the_secret_of_this_user(common: Cluster) -> None:
    port = bootstrap_port(common.prefills[0])
    room = {"bootstrap_room": 5, "dp_rank": 0}
    status, answer = call(port, "POST", "/register_dp_rank", room, {})
    assert (status, json.loads(answer)["error"]["code"]) == (401, "unsigned")
    assert written(port, "POST", "/register_dp_rank", room, user_secret(os.environ).raw) == (200, b"OK")


def test_a_secret_that_is_none_ends_the_start_with_one_line(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    secret = tmp_path / "secret"
    secret.write_text("short")
    secret.chmod(0o600)
    with Fleet(tmp_path, engines=1) as fleet:
        words = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0")
        fleet.start("prefill", serve_words(MODEL, port, *words, "--cluster-secret-file", str(secret)), port=port)
        with pytest.raises(CommandFailed, match=r"prefill: the cluster secret in .* has 5 bytes; it must have 16"):
            fleet.wait_ready(timeout_s=START_S)
