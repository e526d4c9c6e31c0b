"""The worker process: its place among others, the engine and its memory, and what the node hears before it is ready.

What it does then is `worker.py`.
"""

import tandem.engine.lean_torch  # noqa: F401  # before torch

# isort: split
import contextlib
import gc
import hashlib
import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tandem.config import ServerConfig
from tandem.core.events import Event
from tandem.core.kv_parts import KvGrid, KvShard
from tandem.core.lockstep import Lockstep
from tandem.core.settings import WindowSettings
from tandem.engine import devices, machine_memory, self_check, weights
from tandem.engine.engine import Engine
from tandem.engine.machine_report import kernels_complaint
from tandem.engine.model_config import ModelError
from tandem.engine.native import library as native
from tandem.engine.parallel import (
    ContextRanks,
    DpRanks,
    Group,
    OneContext,
    OneRank,
    OneShard,
    OneStage,
    Pipeline,
    Shard,
    WorkerGone,
)
from tandem.engine.weights import LoadedModel
from tandem.environment import STAGED_KV, environment_switch
from tandem.grammar import GrammarError, Vocabulary
from tandem.host_memory import HostMemory
from tandem.membership import ClusterSecret
from tandem.page_files import PageFiles
from tandem.server import logs, wire
from tandem.server.channel import BlockingChannel, ChannelClosed
from tandem.server.node.peers import numeric_host
from tandem.server.node.session import CONTROL_PROTOCOL
from tandem.server.pool_size import pool_size
from tandem.server.processes import (
    EXIT_WITH_OTHERS,
    Launch,
    ServerFailure,
    engines_here,
    owns_cores,
    process_name,
    read_launch,
)
from tandem.server.worker import KvBytes, Worker, WorkerEngine
from tandem.server.worker_storage import open_page_files
from tandem.transfer import nixl_access, shared_memory
from tandem.transfer.pages import PageAccess, Pages
from tandem.transfer.port import Backend
from tandem.transfer.protocol import VERSION as DATA_PROTOCOL
from tandem.transfer.sock import IO_TIMEOUT_S, MOST_FRAMES, SockTransfer
from tandem.transfer.staged_pages import StagedPages

logger = logging.getLogger("tandem.worker")


def layout_fields(config: ServerConfig, model: LoadedModel) -> dict[str, str]:
    """What two servers must have in common before KV may travel between them."""
    return {
        "protocol": f"{CONTROL_PROTOCOL}.{DATA_PROTOCOL}",
        "page_size": str(config.page_tokens),
        **model.layout_fields,
        **({"dllm_threshold": str(config.dllm_threshold)} if model.config.blocks is not None else {}),
    }


def layout_digest(fields: dict[str, str]) -> str:
    text = "\n".join(f"{name}={value}" for name, value in sorted(fields.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that can run, and what the node has to know of it."""

    engine: WorkerEngine
    num_pages: int
    grid: KvGrid  # of the whole model
    vocab_size: int
    layout_fields: dict[str, str]
    whole_prompts: bool = False  # an encoder's: a prompt is computed in one batch
    block_tokens: int = 1  # that a row samples at once
    windows: WindowSettings | None = None  # of some layers
    kernels: str = ""  # how it computes, in words


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """This worker among those of its replica, or with DP attention among those of all ranks."""

    device: str
    group: Group
    pipeline: Pipeline
    least: Callable[[int], int]  # of what all of them call it with
    ranks: DpRanks
    lockstep: Lockstep
    context: ContextRanks = OneContext()  # noqa: RUF009 - frozen


def join_replica(launch: Launch, listener_fd: int | None) -> WorkerPlace:
    """Returns when all are there. Raises ServerFailure, ModelError. `listener_fd`: see `process_group.Meeting`."""
    device = devices.take(launch.config.device, worker=launch.worker, workers=launch.config.num_workers)
    topology, lockstep = launch.topology, Lockstep(launch.topology.attn_dp_size)
    if launch.rank.num_shards == topology.attn_dp_size == 1:
        return WorkerPlace(device, OneShard(), OneStage(), lambda number: number, OneRank(), lockstep)
    # torch.distributed costs who has nobody to talk to a good part of its start.
    process_group = importlib.import_module("tandem.engine.process_group")
    row_exchange = importlib.import_module("tandem.engine.row_exchange")
    at = process_group.Meeting(launch.group_host, launch.group_port, listener_fd, launch.group_own, device)
    try:
        if topology.attn_dp_size > 1:
            ranks = row_exchange.RowExchange(Shard(topology.attn_dp_rank, topology.attn_dp_size), lockstep, at)
            return WorkerPlace(device, OneShard(shared=ranks), OneStage(), process_group.least, ranks, lockstep)
        peers = process_group.ReplicaGroup(launch.rank, at, is_exact=launch.config.deterministic)
    except (OSError, RuntimeError) as error:
        raise ServerFailure(f"the workers of this server do not find each other: {error}") from error
    return WorkerPlace(device, peers.group, peers.pipeline, process_group.least, OneRank(), lockstep, peers.context)


def load_engine(launch: Launch, place: WorkerPlace) -> Loaded:
    """Raises ModelError, ServerFailure, OSError."""
    config = launch.config
    if (complaint := kernels_complaint()) is not None:
        raise ServerFailure(complaint)
    torch.set_num_threads(launch.cpu_threads)
    load = partial(
        weights.load,
        Path(launch.model_dir),
        dtype=config.dtype,
        device=place.device,
        is_embedding=config.is_embedding,
        quantization=config.quantization,
        kv_is_int8=config.kv_cache_dtype == "int8",
        packing_share=0.0 if config.deterministic else weights.PACKING_SHARE / engines_here(config),
    )
    model = load(group=place.group, stage=place.pipeline.stage)
    pool = pool_size(config, model, place.least)
    if config.deterministic:
        is_whole = launch.rank.num_shards == 1
        model = self_check.proven(
            model if is_whole else load(),
            part=None if is_whole else model,
            threads=launch.cpu_threads,
            may_lower=config.cpu_threads == 0,
            page_size=config.page_tokens,
            attention=config.attention_backend,
        )
    vocabulary = open_vocabulary(Path(launch.model_dir), model) if place.pipeline.samples else None
    engine = open_engine(config, model, place, pool.num_pages, vocabulary)
    native.set_waiting(spins=owns_cores(config, launch.cpu_threads))
    logger.info(
        "engine: %s, %d threads; %s parameters in %s, context of %d tokens, KV for %d",
        engine.kernels,
        torch.get_num_threads(),
        in_thousands(model.num_parameters),
        "/".join(model.layout_fields[name] for name in ("quantization", "dtype") if name in model.layout_fields),
        config.context_length or model.max_context,
        pool.num_pages * config.page_tokens,
    )
    return Loaded(
        engine,
        pool.num_pages,
        model.kv_grid,
        model.config.vocab_size,
        layout_fields(config, model),
        whole_prompts=model.config.encoder is not None,
        block_tokens=model.attention.block_tokens,
        windows=pool.windows,
        kernels=engine.kernels,
    )


def in_thousands(count: int) -> str:
    """In thousands, millions or billions, by the usual letter."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


Load = Callable[[Launch, WorkerPlace], Loaded]


def start(
    launch: Launch,
    channel: BlockingChannel[wire.NodeToWorker],
    listener_fd: int | None = None,
    load: Load = load_engine,
) -> None:
    """Load, say EngineReady, and run. Raises what `load` raises."""
    place = join_replica(launch, listener_fd)
    loaded = load(launch, place)
    engine = loaded.engine
    host_pages = place.least(host_tier_pages(launch.config, loaded)) if launch.config.enable_hierarchical_cache else 0
    host = open_host_memory(host_pages, engine.kv.page_bytes) if host_pages else None
    files = open_storage(launch, loaded) if launch.config.hicache_storage_backend else None
    transfer = open_transfer(launch, loaded, channel)
    data = wire.DataEndpoint(transfer.host, transfer.port, transfer.unix) if transfer else wire.DataEndpoint("", 0)
    try:
        channel.send(
            wire.EngineReady(
                num_pages=loaded.num_pages,
                page_bytes=engine.kv.page_bytes,
                grid=loaded.grid,
                layout=layout_digest(loaded.layout_fields),
                layout_fields=loaded.layout_fields,
                vocab_size=loaded.vocab_size,
                data=data,
                whole_prompts=loaded.whole_prompts,
                host_pages=host_pages,
                block_tokens=loaded.block_tokens,
                windows=loaded.windows,
            )
        )
        gc.collect()
        gc.freeze()  # torch leaves half a million objects behind; the collector need not look at them again
        Worker(
            launch.rank,
            engine,
            transfer,
            channel,
            lockstep=place.lockstep,
            dp_rank=launch.dp_rank,
            host=host,
            files=files,
        ).run()
    finally:
        if transfer is not None:
            transfer.close()


def host_tier_pages(config: ServerConfig, loaded: Loaded) -> int:
    """Raises ServerFailure where there is no room for one page, or not so much memory."""
    if loaded.engine.kv.buffer is None:
        raise ServerFailure("--enable-hierarchical-cache copies pages on the CPU, and KV is in memory of a device")
    page_bytes = loaded.engine.kv.page_bytes
    by_size = int(config.hicache_size * 1e9) // page_bytes
    num_pages = by_size if config.hicache_size else int(loaded.num_pages * config.hicache_ratio)
    left_bytes = machine_memory.total_bytes("cpu") // config.num_workers_here - pool_bytes(loaded)
    if not 0 < num_pages * page_bytes <= left_bytes:
        raise ServerFailure(
            f"host memory for {num_pages} pages of {page_bytes} bytes is not there, or too little to be of use; "
            "change --hicache-size or --hicache-ratio"
        )
    return num_pages


def pool_bytes(loaded: Loaded) -> int:
    """That the KV pool may take."""
    kv, windows = loaded.engine.kv, loaded.windows
    num_cut = loaded.num_pages - windows.max_parts if windows is not None else 0
    return loaded.num_pages * kv.page_bytes - num_cut * kv.window_bytes


def open_storage(launch: Launch, loaded: Loaded) -> PageFiles:
    """Raises ServerFailure."""
    kernels = f"{loaded.kernels} {launch.config.attention_backend}"
    return open_page_files(
        launch.config, loaded.layout_fields, kernels, launch.rank, page_bytes=loaded.engine.kv.page_bytes
    )


def open_host_memory(num_pages: int, page_bytes: int) -> HostMemory:
    """Raises ServerFailure."""
    try:
        return HostMemory(num_pages, page_bytes)
    except OSError as error:
        raise ServerFailure(f"no host memory ({error.strerror}); lower --hicache-size or --hicache-ratio") from error


def open_vocabulary(model_dir: Path, model: LoadedModel) -> Vocabulary | None:
    """None where grammars cannot be followed: the API process, which reads the same file, refuses them all."""
    try:
        return Vocabulary(model_dir / "tokenizer.json", size=model.config.vocab_size)
    except GrammarError as error:
        logger.info("no structured output: %s", error)
        return None


def open_engine(
    config: ServerConfig, model: LoadedModel, place: WorkerPlace, num_pages: int, vocabulary: Vocabulary | None
) -> Engine:
    """Raises ServerFailure where there is no memory for the pool."""
    try:
        return Engine(
            model,
            page_size=config.page_tokens,
            num_pages=num_pages,
            deterministic=config.deterministic,
            attention=config.attention_backend,
            pipeline=place.pipeline,
            ranks=place.ranks,
            context=place.context,
            vocabulary=vocabulary,
            block_threshold=config.dllm_threshold,
            maps_kv=not environment_switch(STAGED_KV),
            graph_rows=config.graph_rows,
        )
    except OSError as error:
        raise ServerFailure(
            f"no memory for a KV pool of {num_pages * config.page_tokens} tokens ({error.strerror}); "
            "lower --max-total-tokens or --mem-fraction-static"
        ) from error


def open_transfer(launch: Launch, loaded: Loaded, channel: BlockingChannel[wire.NodeToWorker]) -> SockTransfer | None:
    """The data plane, where the role needs one. Raises ServerFailure."""
    kv = loaded.engine.kv
    if launch.config.role == "unified":
        return None

    def report(event: Event) -> None:
        with contextlib.suppress(ChannelClosed):  # the node is gone; this process is about to notice
            channel.send(event)

    backend, gives_back = Backend(launch.config.disaggregation_transfer_backend), loaded.windows is not None
    if kv.buffer is None:
        if backend in (Backend.SHM, Backend.NIXL):
            raise ServerFailure(
                f"--disaggregation-transfer-backend {backend.value} does not reach KV in memory of a device; use sock"
            )
        backend = Backend.SOCK
        logger.info("KV is in memory of a device: pages travel by way of copies in host memory (staged)")
    try:
        transfer = SockTransfer(
            pages_of(kv, loaded.num_pages),
            KvShard(loaded.grid, launch.rank.cut, launch.rank.shard, kv.cell_bytes),
            incarnation=launch.incarnation,
            secret=ClusterSecret(launch.cluster_secret),
            host=numeric_host(launch.config.host),
            report=report,
            memory=memory_to_lend(kv, backend, gives_back=gives_back),
            gives_back=gives_back,
            backend=backend,
        )
    except RuntimeError as error:  # the system has no thread left
        raise ServerFailure(f"the data plane cannot begin: {error}") from error
    if backend is Backend.NIXL:
        try:
            transfer.start_nixl(lends=launch.config.role == "prefill")
        except nixl_access.Unavailable as error:
            raise ServerFailure(f"--disaggregation-transfer-backend nixl: {error}") from error
    return transfer


def pages_of(kv: KvBytes, num_pages: int) -> PageAccess:
    if kv.buffer is not None:
        return Pages(kv.buffer, kv.page_bytes)
    assert kv.copies is not None
    return StagedPages(
        kv.copies, num_pages=num_pages, page_bytes=kv.page_bytes, max_slots=MOST_FRAMES, timeout_s=IO_TIMEOUT_S
    )


def memory_to_lend(kv: KvBytes, backend: Backend, *, gives_back: bool) -> int | None:
    """The descriptor that peers on this host get, sealed; None: they are sent bytes. Raises ServerFailure."""
    if kv.fd is None or backend in (Backend.SOCK, Backend.NIXL):
        return None
    try:
        return shared_memory.seal(kv.fd, gives_back=gives_back)
    except OSError as error:
        if backend is Backend.SHM:
            raise ServerFailure(f"this system cannot seal shared memory ({error.strerror}); use sock") from error
        logger.info("peers on this host are sent bytes: memory cannot be sealed (%s)", error.strerror)
        return None


def main(load: Load = load_engine) -> int:
    launch = read_launch()
    name = launch.rank.name
    logs.set_up(launch.config.log_format, process=process_name(launch, name))
    channel_fd, *listener_fd = map(int, sys.argv[1:])
    channel: BlockingChannel[wire.NodeToWorker] = BlockingChannel(
        socket.socket(fileno=channel_fd), wire.NodeToWorker, keys=launch.node_keys
    )
    try:
        start(launch, channel, listener_fd[0] if listener_fd else None, load)
    except ChannelClosed:
        return EXIT_WITH_OTHERS  # says nothing: why it all ends is said by, or seen of, who was first
    except WorkerGone as error:
        logger.info("ends with another worker of this replica: %s", error)
        return EXIT_WITH_OTHERS
    except Exception as error:
        is_expected = isinstance(error, ModelError | ServerFailure | OSError | MemoryError)
        if not is_expected:
            logger.exception("the worker met an error of ours")
        with contextlib.suppress(ChannelClosed):  # nobody is there to hear it
            channel.send(wire.Died(name, str(error) if is_expected else f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads of the transfer and of torch have nothing left to do
