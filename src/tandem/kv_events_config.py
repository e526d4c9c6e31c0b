"""What `--kv-events-config` says: vLLM's and SGLang's JSON, so that a command line for their servers does here.

Ports rise by the DP rank, as theirs do: rank 2 of `tcp://*:5557` publishes at 5559.
"""

import re
from importlib.util import find_spec
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, structs

EXAMPLE = '{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'
_ENDPOINT = re.compile(r"(?P<place>tcp://.+):(?P<port>[0-9]{1,5})|(?P<path>ipc://.+)")
MOST_PORT = (1 << 16) - 1

Endpoint = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1, le=10_000_000)]


class KvEventsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    publisher: Literal["zmq"] = "zmq"
    endpoint: Endpoint = "tcp://*:5557"  # with a `*` or `::`, or a path: bound; another host: connected to
    replay_endpoint: Endpoint | None = None  # bound; None: what a subscriber has missed is not told again
    buffer_steps: Count = 10_000  # batches that are kept to be told again
    hwm: Count = 100_000  # batches that wait for one slow subscriber; then it misses some
    max_queue_size: Count = 100_000  # batches that wait for the thread that sends them; then all miss some
    topic: Annotated[str, Meta(max_length=256)] = ""
    enable_kv_cache_events: Literal[True] = True  # vLLM's switch, which this flag is

    @property
    def binds(self) -> bool:
        """As vLLM and SGLang read an endpoint."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith("ipc://")


def read(text: str) -> KvEventsConfig:
    """Raises ValueError with what is wrong."""
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    for endpoint in (config.endpoint, config.replay_endpoint):
        if endpoint is not None:
            at_rank(endpoint, 0)
    return config


def at_rank(endpoint: str, dp_rank: int) -> str:
    """The endpoint of one DP rank. Raises ValueError where there is none."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None:
        raise ValueError(f"{endpoint!r} is neither tcp://HOST:PORT nor ipc://PATH")
    if found["path"]:
        return endpoint if dp_rank == 0 else f"{endpoint}_dp{dp_rank}"
    port = int(found["port"]) + dp_rank
    if not 1 <= port <= MOST_PORT:
        raise ValueError(f"{endpoint} has no port for DP rank {dp_rank}")
    return f"{found['place']}:{port}"


def shifted(config: KvEventsConfig, ranks: int) -> KvEventsConfig:
    """For a server behind others that have so many DP ranks together. Raises ValueError."""
    replay = config.replay_endpoint
    return structs.replace(
        config,
        endpoint=at_rank(config.endpoint, ranks),
        replay_endpoint=None if replay is None else at_rank(replay, ranks),
    )


def complaint(text: str | None, *, dp_size: int) -> str | None:
    """What is wrong with the flag, if anything is."""
    if text is None:
        return None
    try:
        config = read(text)
        asked = [config.endpoint] if config.replay_endpoint is None else [config.endpoint, config.replay_endpoint]
        taken = [[at_rank(one, rank).rpartition(":")[2] for rank in range(dp_size)] for one in asked]
    except ValueError as error:
        return str(error)
    both = set(taken[0]) & set(taken[-1]) if len(taken) > 1 and config.binds else set[str]()
    return f"endpoint and replay_endpoint of {dp_size} ranks meet at {min(both)}" if both else None


def is_installed() -> bool:
    return find_spec("zmq") is not None
