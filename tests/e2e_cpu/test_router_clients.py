"""chat, eval and bench as users run them, through a router in front of fake workers."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from router_fakes import Answer, Fleet, Reject, eventually, fleet

CHUNKS = (
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"content": "forty"}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"content": "-two"}, "finish_reason": "stop"}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\n',
    b"data: [DONE]\n\n",
)


def tandem(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.cli.main", *words]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)


def speak(made: Fleet, *behaviours: Any) -> None:
    made.decodes[0].behaves(*(behaviours or (Answer(chunks=CHUNKS),)))


def test_chat_answers_each_line_of_its_input_and_remembers_the_conversation() -> None:
    with fleet() as made:
        speak(made)
        done = tandem("chat", "--url", made.url, "--max-tokens", "7", "--temperature", "0", given="one?\n\ntwo?\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, "forty-two\nforty-two\n", "")
        first, second = (seen.body for seen in made.decodes[0].generations)
        assert (first["max_tokens"], first["temperature"], first["model"]) == (7, 0, "fake")
        assert [message["content"] for message in second["messages"]] == ["one?", "forty-two", "two?"]


def test_chat_says_in_one_line_that_there_is_no_server_or_what_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    done = tandem("chat", "--url", f"http://127.0.0.1:{port}", given="x\n")
    assert done.returncode == 1
    assert "no server answers" in done.stderr
    assert done.stderr.count("\n") == 1
    with fleet() as made:
        speak(made, Reject(400, "context_length_exceeded"))
        done = tandem("chat", "--url", made.url, given="x\n")
        assert (done.returncode, done.stderr) == (1, "tandem: error: 400: context_length_exceeded: told to\n")


def test_eval_counts_right_answers(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text("".join(f'{{"question": "q{n}", "answer": "{n}"}}\n' for n in (42, 42, 42, 7)))
    answer = Answer(body={"choices": [{"message": {"content": "6 * 7 = 42\n#### 42"}}]})
    words = ("eval", "--dataset", str(file), "--concurrency", "2")
    with fleet() as made:
        speak(made, answer)
        done = tandem(*words, "--url", made.url)
        assert (done.returncode, done.stdout.splitlines()[0][:32]) == (0, "accuracy 0.7500: 3 of 4 right, 0")
        assert "4/4" in done.stderr
        assert made.decodes[0].generations[0].body["temperature"] == 0
        done = tandem(*words, "--url", made.url, "--min-accuracy", "0.8", "--json", "--num", "4")
        assert done.returncode == 1
        assert json.loads(done.stdout)["accuracy"] == 0.75
        speak(made, answer, Reject(400))
        done = tandem(*words, "--url", made.url, "--json")
        assert (done.returncode, json.loads(done.stdout)["failed"]) == (0, 3)


def test_bench_measures_closed_and_open_loops() -> None:
    with fleet() as made:
        speak(made)
        words = ("bench", "--url", made.url, "--num-prompts", "6", "--endpoint", "chat", "--json", "--output-len", "9")
        for loop in (("--concurrency", "3"), ("--rate", "50", "--seed", "3")):
            done = tandem(*words, *loop)
            assert done.returncode == 0, done.stderr
            report = json.loads(done.stdout)
            assert (report["completed"], report["failed"], report["paths"]) == (6, 0, {"remote": 6})
            assert (report["input_tokens"], report["output_tokens"]) == (30, 12)
            assert 0 < report["ttft_ms"]["p50"] <= report["e2e_ms"]["p50"]
        bodies = [seen.body for seen in made.decodes[0].generations]
        assert len(bodies) == 16  # two of each run are warm-up
        assert bodies[0]["max_tokens"] == 9
        # the fake's /tokenize knows two tokens per 200 words
        assert {len(body["messages"][0]["content"].split()) for body in bodies} == {12800}


def test_bench_reports_failures_and_fails_when_nothing_succeeds() -> None:
    with fleet() as made:
        speak(made, Answer(chunks=CHUNKS), Reject(400, "bad"))
        done = tandem("bench", "--url", made.url, "--num-prompts", "3", "--endpoint", "chat", "--warmup", "0")
        assert (done.returncode, "1 of 3 requests" in done.stdout) == (0, True)
        assert "failed: 2 x 400: bad: told to" in done.stdout
        done = tandem("bench", "--url", made.url, "--num-prompts", "2", "--endpoint", "chat", "--warmup", "0")
        assert done.returncode == 1
        assert "no request succeeded" in done.stderr


def test_the_router_process_serves_and_ends_well_on_sigterm() -> None:
    with fleet() as made:
        prefill, decode = made.prefills[0].url, made.decodes[0].url
        words = ["router", "--prefill", prefill, "9000", "--decode", decode, "--port", "0"]
        command = [sys.executable, "-m", "tandem.cli.main", *words]
        router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert router.stdout is not None
            url = router.stdout.readline().strip().rpartition(" ")[2]
            eventually(lambda: tandem("chat", "--url", url, given="").returncode == 0, "the router answers")
            router.terminate()
            assert router.wait(15) == 0
        finally:
            router.kill()
            router.communicate()


def test_no_client_command_imports_torch() -> None:
    names = ", ".join(
        f"tandem.cli.{name}" for name in ("main", "router", "chat", "chat_terminal", "eval", "bench", "top")
    )
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


TOLD_AT_ONCE = """
import signal, uvicorn
from tandem.cli.main import main
run = uvicorn.Server.run
def told(server, sockets):
    signal.raise_signal(signal.SIGTERM)
    run(server, sockets)
uvicorn.Server.run = told
words = "router --port 0 --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2"
raise SystemExit(main(words.split()))
"""


def test_a_router_that_is_told_to_end_before_its_server_listens_to_signals_ends() -> None:
    done = subprocess.run([sys.executable, "-c", TOLD_AT_ONCE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "does not answer yet" not in line] == []
