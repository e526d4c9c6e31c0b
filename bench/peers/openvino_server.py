"""OpenVINO GenAI behind `/v1/completions`: run in its environment, as `openvino_server.py FOLDER PORT THREADS`.

Streams only, greedy, as many tokens as asked for: what `load` needs. Connections are another process's business, for a
step of the pipeline holds Python's lock: no thread beside it would read or write until its end.
"""

import json
import multiprocessing
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread

import openvino_genai as genai  # pyright: ignore[reportMissingImports] it is in that environment

CACHE_GB = 2
PROPERTIES = {"KV_CACHE_PRECISION": "f16", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}  # would be eight bits, and 32


class Front(ThreadingHTTPServer):
    """Asks the pipeline's process for prompts, and hands on what it makes: lists of a stream, a text, its tokens."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, pipeline: Connection) -> None:
        super().__init__(("127.0.0.1", port), Answer)
        self.pipeline, self.lock, self.numbers = pipeline, Lock(), count()
        self.streams: dict[int, SimpleQueue[tuple[str, int]]] = {}
        Thread(target=self.hand_on, daemon=True).start()

    def ask(self, prompt: str, tokens: int) -> "SimpleQueue[tuple[str, int]]":
        made: SimpleQueue[tuple[str, int]] = SimpleQueue()
        with self.lock:
            number = next(self.numbers)
            self.streams[number] = made
            self.pipeline.send((number, prompt, tokens))
        return made

    def hand_on(self) -> None:
        try:
            while True:
                for number, text, tokens in self.pipeline.recv():
                    self.streams[number].put((text, tokens))
        finally:
            os._exit(1)  # the pipeline's process has ended


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.begin("application/json")
        self.wfile.write(json.dumps({"object": "list", "data": [{"id": "peer", "object": "model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, Front)
        made = self.server.ask(body["prompt"], body["max_tokens"])
        self.begin("text/event-stream")
        total = 0
        while (one := made.get())[1]:
            total += one[1]
            self.event({"choices": [{"index": 0, "text": one[0], "finish_reason": None}]})
        self.event({"choices": [], "usage": {"completion_tokens": total}})

    def begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def event(self, value: object) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for each request is work, too."""


def main() -> None:
    folder, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=front, args=(port, here, there), daemon=True).start()
    there.close()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = False
    properties = PROPERTIES | {"INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    here.send("ready")
    serve(pipeline, here)


def front(port: int, pipelines: Connection, pipeline: Connection) -> None:
    pipelines.close()
    pipeline.recv()
    Front(port, pipeline).serve_forever()


def serve(pipeline: genai.ContinuousBatchingPipeline, asked: Connection) -> None:
    """A step after the other, with all that were asked for before it. A stream ends with no token."""
    tokenizer = pipeline.get_tokenizer()
    running = {}
    while True:
        while not running or asked.poll():
            number, prompt, tokens = asked.recv()
            config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
            running[number] = pipeline.add_request(number, prompt, config)
        pipeline.step()
        made: list[tuple[int, str, int]] = []
        for number, handle in list(running.items()):
            ids = [i for output in (handle.read().values() if handle.can_read() else ()) for i in output.generated_ids]
            if ids:
                made.append((number, tokenizer.decode(ids), len(ids)))
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del running[number]
                made.append((number, "", 0))
        asked.send(made)


main()
