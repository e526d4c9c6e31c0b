"""A server's own endpoints, in front of a node that answers by a script: unified, prefill and decode, by `X-Role`, and
unified ones that make vectors or scores.
"""

from collections.abc import Mapping

from api_fakes import WORKERS, World, says, world
from engine import Run, Target
from mutators import mutate_http

from tandem.server import wire
from tandem.server.api.limits import Task
from tandem.server.channel import FrameDecoder, frame
from targets.http import Refused, Served, check_served, new_loop, request, until

ROLES = ("unified", "prefill", "decode", "embeddings", "scores")
ANSWERS = {
    "worker": WORKERS,
    "metrics": {},
    "state": {"queues": {}},
    "waits": [],
    "flush": {"pages": 0},
    "faults": wire.Faults(0.0, 0.0, 1),
}
PROMPT = [5, 6, 7, 8]
MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": [{"type": "text", "text": "c"}]}]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "n": 2,
    "stop": ["o", "k"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "skip_special_tokens": False,
}
PAIR = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": "4611686018427387905"}
ROUTING = {
    "rid": "one",
    "priority": 0,
    "timeout": 30.5,
    "cache_salt": "s",
    "routed_dp_rank": 0,
    "data_parallel_rank": 0,
    "disagg_prefill_dp_rank": 0,
}


def seeds() -> Mapping[str, bytes]:
    native = {"max_new_tokens": 4, "min_new_tokens": 1, "sampling_seed": 7, **SAMPLING}
    openai = {"model": "toy", "max_tokens": 4, "min_tokens": 1, "seed": 7, **SAMPLING, **ROUTING}
    posts: dict[str, tuple[str, object]] = {
        "chat": ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **openai}),
        "chat_stream": (
            "/v1/chat/completions",
            {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "tools": []},
        ),
        "chat_fields": (
            "/v1/chat/completions",
            {
                "messages": MESSAGES,
                "max_completion_tokens": 3,
                "response_format": {"type": "text"},
                "tool_choice": "none",
                "reasoning_effort": "low",
                "chat_template_kwargs": {"a": 1},
                "add_generation_prompt": True,
                "continue_final_message": False,
                "modalities": ["text"],
                "use_beam_search": False,
                "return_token_ids": True,
                "include_stop_str_in_output": True,
            },
        ),
        "completion": ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, **openai}),
        "completion_echo": ("/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 2}),
        "completion_ids": ("/v1/completions", {"prompt": [PROMPT, [1]], "stream": True, "best_of": 1}),
        "responses": (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 3, "metadata": {"a": "b"}, **SAMPLING, "n": 1},
        ),
        "responses_stream": (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "c"},
                ],
                "instructions": "d",
                "text": {"format": {"type": "text"}},
                "stream": True,
                "store": False,
            },
        ),
        "native": ("/generate", {"text": "a", "sampling_params": native, "return_logprob": True, **ROUTING}),
        "native_ids": (
            "/generate",
            {
                "input_ids": PROMPT,
                "stream": True,
                "top_logprobs_num": 2,
                "logprob_start_len": -1,
                "return_logprob": True,
                "return_text_in_logprobs": True,
            },
        ),
        "native_batch": ("/generate", {"input_ids": [PROMPT, [9]], "sampling_params": [native, {}], "rid": ["a", "b"]}),
        "tokenize": ("/tokenize", {"prompt": ["a", "b"], "add_special_tokens": True, "return_token_strs": True}),
        "tokenize_chat": ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": True}),
        "detokenize": ("/detokenize", {"tokens": [PROMPT, [1]], "skip_special_tokens": True}),
        "abort": ("/abort_request", {"rid": "one", "abort_all": False}),
        "flush": ("/flush_cache", {}),
    }
    found = {name: request("POST", path, body) for name, (path, body) in posts.items()}
    for role in ("prefill", "decode"):
        for name in ("chat_stream", "completion", "native"):
            path, body = posts[name]
            assert isinstance(body, dict)
            found[f"{role}_{name}"] = request("POST", path, body | PAIR, x_role=role)
        lists = {
            key: [value, value] for key, value in {**PAIR, "routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}.items()
        }
        lists |= {"bootstrap_room": [11, 12]}
        found[f"{role}_batch"] = request("POST", "/generate", {"input_ids": [PROMPT, [9]], **lists}, x_role=role)
    pooled = {"documents": ["a", {"text": "b"}], "query": "c", "top_n": 1, "return_documents": True, "rid": "one"}
    scored = {"text_1": ["a", "b"], "text_2": ["c", "d"], "timeout": 30.5}
    embedded = {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "add_special_tokens": False}
    for role in ("embeddings", "scores"):
        found[f"{role}_rerank"] = request("POST", "/v1/rerank", pooled, x_role=role)
        found[f"{role}_score"] = request("POST", "/score", scored, x_role=role)
    found["embeddings"] = request("POST", "/v1/embeddings", embedded, x_role="embeddings")
    found["embeddings_ids"] = request("POST", "/v1/embeddings", {"input": [PROMPT, [1]]}, x_role="embeddings")
    paths = ("/health", "/health_generate", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/toy",
             "/server_info", "/model_info", "/v1/loads", "/get_load", "/openapi.json", "/debug/waits",
             "/debug/state", "/debug/faults", "/v1/responses/resp_1",
             "/v1/responses/resp_1/input_items?limit=3")  # fmt: skip
    for path in paths:
        found["get" + path.replace("/", "_")] = request("GET", path, authorization="Bearer key")
    faults = {"force_optimistic_prefill_retry_prob": 0.5, "disagg_failure_prob": 0.0}
    found["put_faults"] = request("PUT", "/debug/faults", faults, x_role="prefill")
    found["chunked"] = (
        b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
        b'c\r\n{"text":"a",\r\n14\r\n"sampling_params":{}\r\n1\r\n}\r\n0\r\n\r\n'
    )
    found["upgrade"] = (
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-role: decode\r\n"
        b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
        b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n"
    )
    found["pipelined"] = found["native"] + found["get_health"]
    return found


class Servers:
    """One application per role."""

    def __init__(self) -> None:
        self._loop = new_loop()
        self._worlds = {role: made(role) for role in ROLES}
        self._served = {role: Served(it.app, self._loop) for role, it in self._worlds.items()}

    def __call__(self, data: bytes) -> None:
        role = next((role for role in ROLES if b"x-role: %b\r\n" % role.encode() in data), "unified")
        it = self._worlds[role]
        statuses = self._served[role].answer(data)
        self._loop.run_until_complete(until(lambda: is_idle(it), lambda: left(it)))
        it.node.submits.clear()
        it.node.sent.clear()
        it.log.seek(0)
        it.log.truncate()
        check_served(statuses)


def made(role: str) -> World:
    mode = {"disaggregation_mode": role} if role in ("prefill", "decode") else {}
    task = {"embeddings": Task.EMBEDDINGS, "scores": Task.SCORES}.get(role, Task.TOKENS)
    it = world(says("ok", is_burst=True), answers=ANSWERS, task=task, enable_fault_injection=True, **mode)  # type: ignore[arg-type]  # fields of the config
    take, frames = it.node.send, FrameDecoder[wire.ApiToNode](wire.ApiToNode)

    def send(message: wire.ApiToNode) -> None:
        """As between processes: what cannot be encoded, or decoded there, is found here."""
        for arrived in frames.feed(frame(message)):
            take(arrived)

    it.node.send = send  # type: ignore[method-assign]  # a fake's
    return it


def is_idle(it: World) -> bool:
    return not any(left(it).values())


def left(it: World) -> dict[str, object]:
    return {
        "live": it.client.num_live,
        "rids": list(it.client._requests._named),
        "queries": [query for rank in it.client.ranks for query in rank._queries],
        "running on the node": list(it.node.running),
    }


def server() -> Run:
    return Servers()


TARGETS = (Target("http_server", server, mutate_http, 2_000, answers=(Refused,), seeds=seeds),)
