"""The servers of one seed, started by the functions that `tandem serve` and `tandem router` call.

What is not their own: the engine of their workers (`engine.py`), which needs no torch and whose answers are known.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec import structs

import tandem
from tandem.config import ServerConfig
from tandem.core.kv.windows import most_seen
from tandem.core.kv_parts import KvGrid
from tandem.core.router.worker_registry import RegisteredWorker
from tandem.core.settings import Role, WindowSettings
from tandem.core.values import ceil_div
from tandem.engine.model_config import read_config
from tandem.server import worker_process
from tandem.server.api.limits import Task
from tandem.server.api.model_facts import ModelFacts
from tandem.server.hosts.follower import follow
from tandem.server.node import process as node_process
from tandem.server.processes import Launch, ServerFailure, bind_listeners, cluster_secret, meeting_place
from tandem.server.router.app import listen, serve_router
from tandem.server.router.config import RouterConfig, make_worker
from tandem.server.start import serve, with_ports
from tandem.server.worker_process import Loaded, WorkerPlace
from tandem.simulator.whole.engine import DIMENSIONS, PlainEngine
from tandem.simulator.whole.kernel import Kernel, Process
from tandem.simulator.whole.shards import Shards
from tandem.simulator.whole.virtual_process import Program

MODEL = Path(tandem.__file__).parent / "bundled" / "mini"
MODEL_HERE = "mini"  # where servers find it, in the folder of a seed: they tell its path, which is the same everywhere

logger = logging.getLogger("tandem.cluster")


@dataclass(slots=True, eq=False)
class Server:
    """One `tandem serve` or `tandem router`, which may live several times, one after the other, at one address.

    Of a server on several hosts each has its own, and its name begins with the server's.
    """

    name: str
    host: str
    port: int
    program: Program
    process: Process | None = None
    lives: int = 0

    @property
    def whole(self) -> str:
        """The name of the server of which this is a host."""
        return self.name.partition(".")[0]

    def start(self, kernel: Kernel, *, max_fds: int = 1 << 20) -> Process:
        self.lives += 1
        self.process = kernel.start(f"{self.name}.{self.lives}", self._run, host=self.host, max_fds=max_fds)
        return self.process

    def _run(self) -> None:
        raise SystemExit(self.program())

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive


@dataclass(frozen=True, slots=True)
class PlainModel:
    """Of all servers of a cluster: how long a batch takes, and the shape of the KV."""

    base_s: float = 0.004
    token_s: float = 0.00005
    grid: KvGrid = KvGrid()  # noqa: RUF009 - it never changes
    looks_both_ways: bool = False  # prompts are computed whole
    block_tokens: int = 1  # that a row samples at once
    window_tokens: int = 0  # that a query sees in layers with a window; 0: no layer has one


def children(model: PlainModel) -> Mapping[str, Program]:
    """The programs that a server starts."""
    return {
        "tandem.server.node.process": node_process.main,
        "tandem.server.worker_process": partial(worker_process.main, partial(load_plain_engine, model=model)),
    }


def load_plain_engine(launch: Launch, place: WorkerPlace, *, model: PlainModel) -> Loaded:
    config, known = launch.config, facts(launch.config)
    assert config.max_total_tokens is not None
    num_pages = place.least(ceil_div(config.max_total_tokens, config.page_tokens))
    engine = PlainEngine(
        num_pages=num_pages,
        page_size=config.page_tokens,
        vocab_size=known.vocab_size,
        tokenizer=MODEL / "tokenizer.json",
        base_s=model.base_s,
        token_s=model.token_s,
        grid=model.grid,
        block_tokens=model.block_tokens,
        window_tokens=model.window_tokens,
        shards=Shards(launch.rank, place.group, place.pipeline, place.ranks, place.context),
    )
    fields = {"page_size": str(config.page_tokens), "model": "plain"}
    return Loaded(
        engine,
        num_pages,
        model.grid,
        known.vocab_size,
        fields,
        whole_prompts=model.looks_both_ways,
        block_tokens=model.block_tokens,
        windows=windows_of(config, model.window_tokens, num_pages) if model.window_tokens else None,
    )


def windows_of(config: ServerConfig, tokens: int, num_pages: int) -> WindowSettings:
    """Few parts where prompts are computed here, and enough for any prompt where they are sent."""
    ahead = config.chunked_prefill_size * config.window_depth
    least = most_seen(tokens, ahead, page_size=config.page_tokens)
    return WindowSettings(tokens, max(least, num_pages // 2 if config.role == "unified" else num_pages))


def facts(config: ServerConfig, *, block_tokens: int = 1) -> ModelFacts:
    model = read_config(MODEL)
    return ModelFacts(
        model_path=MODEL_HERE,
        architectures=[model.architecture],
        model_type="plain",
        context_length=config.context_length or model.max_context,
        page_size=config.page_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_ids),
        dtype="float32",
        task=Task.EMBEDDINGS if config.is_embedding else Task.TOKENS,
        dimensions=DIMENSIONS,
        block_tokens=block_tokens,
    )


ReadFacts = Callable[[ServerConfig], ModelFacts]


def facts_of_checkpoint(config: ServerConfig) -> ModelFacts:
    """What the product's engine has to do with: the one that the folder of this seed has."""
    model = read_config(Path(MODEL_HERE), is_embedding=config.is_embedding)
    return structs.replace(
        facts(config),
        architectures=[model.architecture],
        context_length=config.context_length or model.max_context,
        dimensions=model.hidden_size,
        is_encoder=model.encoder is not None,
        has_states=model.state_space is not None,
        block_tokens=1 if model.blocks is None else model.blocks.block_tokens,
    )


def server(name: str, config: ServerConfig, *, machine: str = "127.0.0.1", read_facts: ReadFacts = facts) -> Server:
    return Server(name, machine, config.port, partial(run_server, config, read_facts))


def further_host(of: str, config: ServerConfig, machine: str) -> Server:
    """One of the hosts of a server that are not its first one. Its port is where they meet."""
    _, port = meeting_place(config)
    return Server(f"{of}.host{config.node_rank}", machine, port, partial(run_further_host, config))


def router(name: str, config: RouterConfig, *, machine: str = "127.0.0.1") -> Server:
    return Server(name, machine, config.port, partial(run_router, config))


def router_workers(
    prefills: Sequence[tuple[str, ServerConfig]], decodes: Sequence[tuple[str, ServerConfig]]
) -> tuple[RegisteredWorker, ...]:
    """Each with the machine where it is."""
    workers: list[RegisteredWorker] = []
    for machine, one in prefills:
        url = f"http://{machine}:{one.port}"
        workers.append(make_worker(len(workers), Role.PREFILL, url, one.disaggregation_bootstrap_port))
    for machine, one in decodes:
        workers.append(make_worker(len(workers), Role.DECODE, f"http://{machine}:{one.port}"))
    return tuple(workers)


def run_server(config: ServerConfig, read_facts: ReadFacts) -> int:
    """As `tandem serve`, from the moment when its flags are read: a server that cannot start says so and ends."""
    try:
        listeners = bind_listeners(config)
        try:
            serve(with_ports(config, listeners), listeners, read_facts(config))
        finally:
            listeners.close()
    except (ServerFailure, OSError) as failure:
        logger.info("ends: %s", failure)
        return 1
    return 0


def run_further_host(config: ServerConfig) -> int:
    """As `tandem serve --node-rank 1`."""
    try:
        secret = cluster_secret(config)
        assert secret is not None, "a server on several hosts has one"
        follow(config, Path(MODEL_HERE), secret)
    except (ServerFailure, OSError) as failure:
        logger.info("ends: %s", failure)
        return 1
    return 0


def run_router(config: RouterConfig) -> int:
    """As `tandem router`."""
    serve_router(config, listen(config))
    return 0
