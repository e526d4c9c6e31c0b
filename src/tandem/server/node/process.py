"""The node process: builds the core's node from the settings and what the engine reports, and drives it.

No torch in here, ever: this process must start in no time, and one plain thread is all that runs.
"""

import errno
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec

from tandem import kv_events_config
from tandem.config import ServerConfig
from tandem.core.disagg.message_checks import Bounds
from tandem.core.scheduler import inspect
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.numbers import numbers
from tandem.core.settings import NodeSettings
from tandem.core.stall_detector import ProgressReport
from tandem.core.values import Nanos
from tandem.environment import FAILED_TRANSFERS, FAULT_SEED, LOG_FORWARD_ITERS, environment_number, environment_switch
from tandem.membership import ClusterSecret, new_challenge
from tandem.metrics.delayer_waits import DelayerWaits
from tandem.metrics.dp_cooperation import DpCooperation
from tandem.metrics.node_numbers import named
from tandem.ranks import all_ranks
from tandem.sampling import are_scores, is_score
from tandem.server import logs, wire
from tandem.server.channel import ChannelClosed, ChannelFull, PolledChannel
from tandem.server.fault_records import folder_of
from tandem.server.node.batch_log import BatchLog, load_of
from tandem.server.node.dispatch import NoSiblings, Siblings, SteppingSiblings
from tandem.server.node.driver import Inbox, Observer, drive
from tandem.server.node.flight import FlightRecorder
from tandem.server.node.injection import FailedTransfers
from tandem.server.node.kv_events import CannotPublish, KvEvents, Publisher
from tandem.server.node.last_steps import keep_last_steps
from tandem.server.node.local_peer import LocalPeerLost, SelectorPoller
from tandem.server.node.peers import Peers, numeric_host
from tandem.server.node.settings import heartbeat, node_settings
from tandem.server.node.workers import Engines
from tandem.server.processes import EXIT_WITH_OTHERS, Launch, ServerFailure, process_name, read_launch

logger = logging.getLogger("tandem.node")

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)  # which may happen to anybody; another error is a wrong folder


class MonotonicClock:
    def now(self) -> Nanos:
        return Nanos(time.monotonic_ns())


@dataclass(slots=True)
class Questions:
    """What the API asks about the node."""

    node: EngineNode
    inbox: Inbox
    cooperation: DpCooperation
    delays: DelayerWaits | None

    def answer(self, query: wire.Query, now: Nanos) -> bytes:
        match query.what:
            case "state":
                found: object = inspect.state(self.node)
            case "waits":
                found = inspect.waits(self.node, now)
            case "flow":
                found = inspect.flow(self.node, now)
            case "metrics":
                found = named(numbers(self.node)) | self._counted()
            case "flush":
                found = {"flushed": True}  # the step before has done it
            case "faults":
                found = self._faults()
            case "pulse":
                found = self._pulse()
            case unknown:
                found = {"error": f"unknown question {unknown}"}
        return msgspec.json.encode(found)

    def _counted(self) -> dict[str, float]:
        """By those who observe the stream."""
        return self.cooperation.numbers() | (self.delays.numbers() if self.delays is not None else {})

    def _faults(self) -> wire.Faults:
        failures = self.inbox.failures
        return wire.Faults(self.node.state.settings.force_retry_prob, failures.prob, failures.seed)

    def _pulse(self) -> ProgressReport:
        window = self.node.state.inflight
        oldest = window[0].forward_iter if window else None
        workers = self.inbox.workers
        launched = self.node.state.forward_ct
        return ProgressReport(launched, oldest, workers.echoes, workers.slowest.name, workers.behind)


MakeNode = Callable[[NodeSettings], EngineNode]


def run(launch: Launch, *, api_fd: int, worker_fds: list[int], make_node: MakeNode) -> None:
    """Until the API process says Shutdown. Raises LocalPeerLost, ServerFailure."""
    clock = MonotonicClock()
    poller = SelectorPoller()
    api: PolledChannel[wire.ApiToNode] = PolledChannel(socket.socket(fileno=api_fd), wire.ApiToNode)
    workers: list[PolledChannel[wire.WorkerToNode]] = [
        PolledChannel(socket.socket(fileno=fd), wire.WorkerToNode, keys=launch.worker_keys.get(shard))
        for shard, fd in enumerate(worker_fds)
    ]
    ranks = all_ranks(*launch.config.cut.sizes)
    failures = FailedTransfers(environment_number(FAILED_TRANSFERS), int(environment_number(FAULT_SEED)))
    inbox = Inbox(poller=poller, api=api, ranks=ranks, workers=workers, clock=clock, failures=failures)
    try:
        _run(launch, inbox, poller, clock, make_node)
    except LocalPeerLost as lost:
        _send_final(api, wire.Died(lost.who, lost.reason))
        raise
    except ServerFailure as failure:
        _send_final(api, wire.Died("node", str(failure)))
        raise
    except Exception as error:
        _send_final(api, wire.Died("node", f"{type(error).__name__}: {error}"))
        raise
    finally:
        for worker in workers:
            _send_final(worker, wire.Shutdown())


def _run(launch: Launch, inbox: Inbox, poller: SelectorPoller, clock: MonotonicClock, make_node: MakeNode) -> None:
    engines = inbox.wait_for_engines()
    if engines is None:
        return
    settings = node_settings(launch, engines)
    node = make_node(settings)
    node.step((), clock.now())  # its life begins before anybody can send it a request
    peers = Peers(
        launch.incarnation,
        engines.layout,
        ClusterSecret(launch.cluster_secret or new_challenge()),  # who has no peers has a secret that nobody shares
        shards=engines.shards,
        bounds=Bounds(
            engines.vocab_size,
            partial(is_score, vocab_size=engines.vocab_size),
            partial(are_scores, vocab_size=engines.vocab_size),
            engines.grid,
            settings.cut,
        ),
        poller=poller,
        report=inbox.report,
        reach=inbox.reach,
        clock=clock.now,
        note=logger.info,
        heartbeat=heartbeat(),
    )
    replica = _replica(launch, engines, settings, peers)
    inbox.meet(peers)
    if launch.config.enable_fault_injection or inbox.failures.prob > 0:
        logger.info("transfers fail with probability %g, seed %d", inbox.failures.prob, inbox.failures.seed)
    recorder = _recorder(launch.config, settings, node)
    kept = keep_last_steps(folder_of(launch.config.fault_records), settings, node)
    observers: list[Observer] = [observer for observer in (recorder, kept) if observer is not None]
    batches = BatchLog(
        logger.info,
        lambda: load_of(numbers(node)),
        shows_numbers=environment_switch(LOG_FORWARD_ITERS),
    )
    observers.append(batches)
    delays = delayer_waits(launch.config, settings)
    if delays is not None:
        observers.append(delays)
    publisher = _publisher(launch, settings)
    if publisher is not None:
        kv_events = KvEvents(publisher, page_size=settings.page_size)
        inbox.prompt_came = lambda submit: kv_events.prompt_came(submit.payload)
        observers.append(kv_events)
    inbox.api.send(wire.NodeReady(replica, engines.num_pages, engines.page_bytes))
    inbox.flush()
    gc.collect()
    gc.freeze()  # what is here now stays; the collector need not look at it again
    try:
        questions = Questions(node, inbox, batches.cooperation, delays)
        drive(node, inbox, clock, observers=observers, answer=questions.answer, siblings=_siblings(launch, inbox))
    except Exception as error:
        if kept is not None:
            kept.write_last(f"the node ends: {type(error).__name__} {error}")
        raise
    finally:
        peers.close()
        if recorder is not None:
            recorder.close()
        if publisher is not None:
            publisher.close()


def delayer_waits(config: ServerConfig, settings: NodeSettings) -> DelayerWaits | None:
    if settings.delayer is None:
        return None
    return DelayerWaits(
        settings.delayer.max_delay_passes,
        passes_bounds=config.prefill_delayer_forward_passes_buckets,
        seconds_bounds=config.prefill_delayer_wait_seconds_buckets,
    )


def _siblings(launch: Launch, inbox: Inbox) -> Siblings:
    if launch.topology.attn_dp_size == 1:
        return NoSiblings()
    return SteppingSiblings(launch.dp_rank, inbox.api)


def _replica(launch: Launch, engines: Engines, settings: NodeSettings, peers: Peers) -> wire.ReplicaInfo:
    """What others are told of this replica. Decode dials, prefill answers: it listens from here on."""
    host = numeric_host(launch.config.host)
    return wire.ReplicaInfo(
        incarnation=launch.incarnation,
        role=launch.config.role,
        layout=engines.layout,
        layout_fields=engines.layout_fields,
        control_host=host,
        control_port=_listen(peers, host) if launch.config.role == "prefill" else 0,
        shards=engines.shards,
        http_port=launch.http_port,
        dp_rank=settings.dp_rank,
        prefill=settings.prefill_info,
    )


def _listen(peers: Peers, host: str) -> int:
    """Its port. Raises ServerFailure, as where no descriptor is left."""
    try:
        return peers.listen(host)
    except OSError as error:
        raise ServerFailure(f"cannot listen for decode servers: {error}") from error


def _recorder(config: ServerConfig, settings: NodeSettings, node: EngineNode) -> FlightRecorder | None:
    if config.flight_record is None:
        return None
    try:
        return FlightRecorder(
            Path(config.flight_record),
            settings,
            node.snapshot,
            max_bytes=config.flight_record_max_bytes,
            note=logger.warning,
        )
    except OSError as error:
        if error.errno in DISK_IS_FULL:
            logger.warning("there is no flight record: %s", error)
            return None
        raise ServerFailure(f"cannot write the flight record: {error}; choose another --flight-record") from error


def _publisher(launch: Launch, settings: NodeSettings) -> Publisher | None:
    """Raises ServerFailure."""
    if launch.config.kv_events_config is None:
        return None
    publishing = import_module("tandem.server.node.kv_publisher")  # only here: an extra brings what it imports
    try:
        return publishing.KvPublisher(
            kv_events_config.read(launch.config.kv_events_config),
            dp_rank=settings.dp_rank,
            page_size=settings.page_size,
            who=launch.incarnation,
            note=logger.warning,
        )
    except CannotPublish as error:
        raise ServerFailure(str(error)) from error


def _send_final(channel: PolledChannel, message: msgspec.Struct) -> None:  # of any kind
    try:
        channel.send(message)
        channel.sock.setblocking(True)
        channel.sock.settimeout(1.0)
        channel.flush()
    except (ChannelClosed, ChannelFull, OSError):
        pass  # nobody is there to hear them, or listens


def main(make_node: MakeNode = EngineNode) -> int:
    launch = read_launch()
    logs.set_up(launch.config.log_format, process=process_name(launch, "node"))
    try:
        run(launch, api_fd=int(sys.argv[1]), worker_fds=[int(fd) for fd in sys.argv[2:]], make_node=make_node)
    except LocalPeerLost:
        return EXIT_WITH_OTHERS  # the parent has been told, if there is anything to tell
    except ServerFailure:
        return 1  # the parent has been told and says it to the user
    except Exception:
        logger.exception("the node met an error of ours")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
