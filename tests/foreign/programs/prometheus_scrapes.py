"""Prometheus with the committed configuration scrapes a pair: it takes every sample, and every expression of the
committed board parses and has data.

`prometheus` and `promtool` are in PATH. What promtool says of names that are not ours to choose, and which expressions
have nothing in a healthy pair, is listed below.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from _shared import BASE, MODEL, QUESTIONS, free_port, post, shown, stream, wait_ready

GRAFANA = Path(__file__).resolve().parents[3] / "docs" / "grafana"
CONFIG = GRAFANA / "prometheus.yml"
BOARD = json.loads((GRAFANA / "tandem.json").read_text())
(VARIABLE,) = (it for it in BOARD["templating"]["list"] if it["type"] == "query")
TARGETS = [target for panel in BOARD["panels"] for target in panel.get("targets", ())]
READY_S, DATA_S, POLL_S = 60.0, 180.0, 0.5
RATE_INTERVAL_S = 60  # of Grafana, for a data source of which it has not been told how often that scrapes
STEP_S = 2

# By nature without data in a healthy pair. Counters of what does not happen in one: there, and 0 may be all they say.
STILL = {
    "sglang:num_prefill_retries_total",
    "sglang:num_retracted_requests_total",
    "sglang:num_bootstrap_failed_reqs_total",
    "sglang:num_transfer_failed_reqs_total",
    "tandem:router_retries_total",
}
# By cause, each a series from its first failure on.
ABSENT = {"tandem:requests_failed_total", "tandem:router_failures_total"}

LINT_FOUND = 3  # exit code of promtool for a page that parses
COLON = "metric names should not contain ':'"  # those of SGLang do, so that of all servers does
UNITS = "metric names should not contain abbreviated units"
UNITS_OF_SGLANG = {"sglang:kv_transfer_latency_ms", "sglang:kv_transfer_speed_gb_s", "sglang:kv_transfer_total_mb"}
NOT_TAKEN = re.compile(r"^(prometheus_target_scrapes_(?:sample_\w+|exceeded_\w+)_total) (\S+)$", re.MULTILINE)


def main() -> None:
    servers = [BASE, *(worker.split()[1] for worker in os.environ["CLIENTS_WORKERS"].splitlines())]
    named = STILL | ABSENT
    assert named <= set().union(*map(names_in, TARGETS)), "the board asks for no such name any more"
    send_requests()
    for server in servers:
        check_page(server)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        config = Path(folder) / "prometheus.yml"
        config.write_text(with_targets(CONFIG.read_text(), servers))
        for file in (CONFIG, config):
            done = subprocess.run(["promtool", "check", "config", file], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        port = free_port()
        words = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", "--log.level=warn"]
        words += [f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(["prometheus", *words], stdout=log, stderr=log)
        try:
            wait_ready(f"http://127.0.0.1:{port}/-/ready", process, ready_s=READY_S)
            wait_data(f"http://127.0.0.1:{port}", len(servers))
            check_taken(f"http://127.0.0.1:{port}")
        except BaseException:
            log.seek(0)
            print(log.read()[-2000:].decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(60)
    still, absent = (sum(bool(names_in(target) & names) for target in TARGETS) for names in (STILL, ABSENT))
    shown(
        f"{version()} takes all samples of {len(servers)} servers as docs/grafana/prometheus.yml says",
        f"{len(TARGETS) - absent} expressions of docs/grafana/tandem.json have data ({still} may stay at 0)",
        f"{absent} have none before a failure",
        "promtool has no more to say than that SGLang's names have colons and short units",
    )


def names_in(target: dict[str, Any]) -> set[str]:
    return set(re.findall(r"\w+:\w+", target["expr"]))


def with_targets(text: str, servers: list[str]) -> str:
    """The committed file, with other servers than it names."""
    hosts = json.dumps([urllib.parse.urlsplit(server).netloc for server in servers])
    replaced, count = re.subn(r"targets: \[.*\]", f"targets: {hosts}", text)
    assert count == 1, text
    return replaced


def version() -> str:
    done = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=True)
    found = re.match(r"prometheus, version (\S+)", done.stdout + done.stderr)
    assert found, done.stdout
    return found[1]


def send_requests() -> None:
    """Chats whole and streamed, and one that is refused."""
    for question in QUESTIONS:
        body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 16}
        post(f"{BASE}/v1/chat/completions", body)
        stream(f"{BASE}/v1/chat/completions", body)
    status = status_of(f"{BASE}/v1/chat/completions", {"model": MODEL})
    assert 400 <= status < 500, f"a chat without messages has status {status}"


def status_of(url: str, body: dict[str, Any]) -> int:
    try:
        post(url, body)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    return 200


def check_page(server: str) -> None:
    with urllib.request.urlopen(f"{server}/metrics", timeout=30) as reply:
        page, kind = reply.read(), reply.headers["content-type"]
    assert kind.startswith("text/plain; version="), (server, kind)
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode().splitlines()
    assert done.returncode in (0, LINT_FOUND), (server, said)
    new = [line for line in said if not is_known(*line.split(" ", 1))]
    assert not new, (server, new)


def is_known(name: str, complaint: str = "") -> bool:
    return complaint == COLON or (complaint == UNITS and name in UNITS_OF_SGLANG)


def get(url: str) -> Any:
    """The data of an answer of Prometheus' API, whose errors say why."""
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{urllib.parse.unquote_plus(url)}: {error.read().decode()}") from error


def wait_data(url: str, num_servers: int) -> None:
    """Until all are scraped and all expressions have data, with traffic all the while: a rate needs two scrapes and
    something that happened in between."""
    until = time.monotonic() + DATA_S
    while True:
        send_requests()
        missing = [*missing_of_scrapes(url, num_servers), *missing_of_variable(url)]
        for model in (VARIABLE["allValue"], MODEL):
            missing += [what for target in TARGETS if (what := missing_of(url, target, model))]
        if not missing:
            return
        assert time.monotonic() < until, "; ".join(missing)
        time.sleep(POLL_S)


def missing_of_scrapes(url: str, num_servers: int) -> list[str]:
    active = get(f"{url}/api/v1/targets?state=active")["activeTargets"]
    if len(active) != num_servers:
        return [f"it scrapes {len(active)} servers"]
    return [f"{it['scrapeUrl']} is {it['health']}: {it['lastError']}" for it in active if it["health"] != "up"]


def missing_of_variable(url: str) -> list[str]:
    """What can be chosen for `$model_name`."""
    found = re.fullmatch(r"label_values\((\S+), (\w+)\)", VARIABLE["definition"])
    assert found, VARIABLE
    values = get(f"{url}/api/v1/label/{found[2]}/values?{urllib.parse.urlencode({'match[]': found[1]})}")
    return [] if values == [MODEL] else [f"{VARIABLE['name']} can be {values}"]


def missing_of(url: str, target: dict[str, Any], model: str) -> str:
    """What is missing in the last minute of an expression; empty: nothing."""
    expr = target["expr"].replace("$__rate_interval", f"{RATE_INTERVAL_S}s").replace("$model_name", model)
    now = time.time()
    fields = {"query": expr, "start": now - RATE_INTERVAL_S, "end": now, "step": STEP_S}
    series = get(f"{url}/api/v1/query_range?{urllib.parse.urlencode(fields)}")["result"]
    for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
        assert all(it["metric"].get(label) for it in series), f"{expr}: its legend has no {label} in {series}"
    if names_in(target) & ABSENT:
        return ""
    values = [number for it in series for _, value in it["values"] if math.isfinite(number := float(value))]
    if not values:
        return f"{expr} has no data"
    moves = "rate(" in expr and not names_in(target) & STILL
    return f"{expr} is always 0" if moves and max(values) <= 0 else ""


def check_taken(url: str) -> None:
    """None is there twice or too late: of such it takes one and counts the others."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        counts = dict(NOT_TAKEN.findall(reply.read().decode()))
    assert counts, "it does not say what it has not taken"
    assert not any(map(float, counts.values())), counts


main()
