"""ab, wrk, hey and h2load: clients in C and Go that count answers and read none, each with connections of its own kind.

ab speaks HTTP/1.0, once with a connection for each request and once with those that it asks to be kept; hey is Go's
net/http, and does not keep them here; h2load sends requests behind each other before the first is answered (HTTP/1.1
pipelining); wrk runs for a while and keeps what it has.
"""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

from _shared import BASE, MODEL, shown

URL = f"{BASE}/v1/chat/completions"
NUMBER, AT_ONCE, SECONDS, LIMIT_S = 24, 4, 3, 120.0
TYPE = "application/json"
SCRIPT = 'wrk.method = "POST"\nwrk.headers["Content-Type"] = "{type}"\nwrk.body = {body}\n'


def run(*words: str) -> str:
    """What it says. Its libraries lie beside the command, in a folder that the system does not look at."""
    unpacked = Path(os.environ["PATH"].partition(os.pathsep)[0]).parent
    libraries = os.pathsep.join(map(str, (unpacked / "lib").glob("*-linux-gnu")))
    env = {**os.environ, "LD_LIBRARY_PATH": libraries}
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def number(pattern: str, said: str) -> int:
    found = re.search(pattern, said)
    assert found, said
    return int(found[1])


def check(folder: Path, *, is_streamed: bool) -> int:
    """How many requests were answered, of which none has failed."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "stream": is_streamed})
    file, script = folder / "body.json", folder / "post.lua"
    file.write_text(body)
    script.write_text(SCRIPT.format(type=TYPE, body=json.dumps(body)))
    size = ("-n", str(NUMBER), "-c", str(AT_ONCE))
    for kept in ((), ("-k",)):
        said = run("ab", "-q", "-l", *kept, *size, "-p", str(file), "-T", TYPE, URL)
        assert number(r"Complete requests: +(\d+)", said) == NUMBER, said
        assert number(r"Failed requests: +(\d+)", said) == 0, said
        assert "Non-2xx" not in said, said
    said = run("hey", *size, "-disable-keepalive", "-m", "POST", "-D", str(file), "-T", TYPE, URL)
    assert number(r"\[200\]\s+(\d+) responses", said) == NUMBER, said
    said = run("h2load", "--h1", *size, "-m", "3", "-d", str(file), "-H", f"content-type: {TYPE}", URL)
    assert number(r" (\d+) succeeded", said) == NUMBER, said
    said = run("wrk", "-t", "1", "-c", str(AT_ONCE), "-d", f"{SECONDS}s", "-s", str(script), URL)
    assert "Socket errors" not in said, said
    assert "Non-2xx" not in said, said
    return 4 * NUMBER + number(r"(\d+) requests in", said)


with tempfile.TemporaryDirectory() as folder:
    for is_streamed in (False, True):
        assert check(Path(folder), is_streamed=is_streamed) > 4 * NUMBER
version = re.search(r"Version ([0-9.]+)", run("ab", "-V"))
assert version
shown(
    f"ab {version[1]}, wrk, hey and h2load",
    "whole and streamed",
    "HTTP/1.0, kept, closed and pipelined connections",
    "none fails",
)
