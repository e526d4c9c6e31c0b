"""The node process: builds the core's node from the settings and what the engine reports, and drives it.

No torch in here, ever: this process must start in no time, and one plain thread is all that runs.
"""

import gc
import logging
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.config import FORCED_RETRIES, ServerConfig, environment_number, environment_switch
from tandem.core.sched import inspect
from tandem.core.sched.node import EngineNode
from tandem.core.settings import DelayerSettings, LoadFailurePolicy, NodeSettings, OptimisticPolicy, Role
from tandem.core.values import MILLISECOND, SECOND, Nanos
from tandem.server import logs, wire
from tandem.server.channel import ChannelClosed, PolledChannel
from tandem.server.node.driver import Inbox, NeighbourLost, Observer, Poller, drive
from tandem.server.node.flight import FlightRecorder
from tandem.server.node.peers import Peers, numeric_host
from tandem.server.processes import Launch, ServerFailure, read_launch

DEFAULT_RETRIES = 3

logger = logging.getLogger("tandem.node")


class MonotonicClock:
    def now(self) -> Nanos:
        return Nanos(time.monotonic_ns())


def node_settings(launch: Launch, engine: wire.EngineReady) -> NodeSettings:
    config = launch.config
    return NodeSettings(
        role=Role(config.role),
        incarnation=launch.incarnation,
        num_pages=engine.num_pages,
        page_size=config.page_size,
        layout=engine.layout,
        max_running=config.max_running_requests,
        max_queued=config.max_queued_requests,
        chunk_tokens=config.chunked_prefill_size,
        window_depth=1 if config.disable_overlap_schedule else 2,
        mixed_chunk=config.enable_mixed_chunk,
        delayer=delayer_settings(config) if config.enable_prefill_delayer else None,
        prefix_cache=not config.disable_radix_cache,
        reserved_decode_tokens=config.num_reserved_decode_tokens,
        conservativeness=config.schedule_conservativeness,
        metadata_slots=config.disaggregation_metadata_slots or 2 * config.max_running_requests,
        optimistic=optimistic_policy(config),
        optimistic_retries=config.optimistic_prefill_retries or DEFAULT_RETRIES,
        force_retry_prob=environment_number(FORCED_RETRIES),
        park_max_tokens=config.disaggregation_park_max_tokens,
        load_failure=LoadFailurePolicy.FAIL
        if config.strict_remote
        else LoadFailurePolicy(config.kv_load_failure_policy),
        stall_timeout_ns=Nanos(int(config.stall_timeout * SECOND)),
    )


def delayer_settings(config: ServerConfig) -> DelayerSettings:
    return DelayerSettings(
        max_delay_passes=config.prefill_delayer_max_delay_passes,
        low_watermark=config.prefill_delayer_token_usage_low_watermark,
        queue_min_ratio=config.prefill_delayer_queue_min_ratio,
        max_delay_ns=Nanos(int(config.prefill_delayer_max_delay_ms * MILLISECOND)),
    )


def optimistic_policy(config: ServerConfig) -> OptimisticPolicy:
    """`--optimistic-prefill-retries` alone selects: 0 is off, more is retry."""
    if config.optimistic_prefill_policy is not None:
        return OptimisticPolicy(config.optimistic_prefill_policy)
    if config.optimistic_prefill_retries is None:
        return OptimisticPolicy.PARK
    return OptimisticPolicy.RETRY if config.optimistic_prefill_retries > 0 else OptimisticPolicy.OFF


@dataclass(slots=True)
class Questions:
    """What the API asks about the node."""

    node: EngineNode

    def answer(self, query: wire.Query, now: Nanos) -> bytes:
        match query.what:
            case "state":
                found: object = inspect.state(self.node)
            case "waits":
                found = inspect.waits(self.node, now)
            case "metrics":
                found = inspect.gauges(self.node)
            case "flush":
                found = {"flushed": True}  # the step before has done it
            case unknown:
                found = {"error": f"unknown question {unknown}"}
        return msgspec.json.encode(found)


def run(launch: Launch, *, api_fd: int, worker_fd: int) -> None:
    """Until the API process says Shutdown. Raises NeighbourLost, ServerFailure."""
    clock = MonotonicClock()
    poller = Poller()
    api: PolledChannel[wire.ApiToNode] = PolledChannel(socket.socket(fileno=api_fd), wire.ApiToNode)
    worker: PolledChannel[wire.WorkerToNode] = PolledChannel(socket.socket(fileno=worker_fd), wire.WorkerToNode)
    inbox = Inbox(poller=poller, api=api, worker=worker, clock=clock)
    try:
        _run(launch, inbox, poller, clock)
    except NeighbourLost as lost:
        _last_words(api, wire.Died(lost.who, lost.reason))
        raise
    except ServerFailure as failure:
        _last_words(api, wire.Died("node", str(failure)))
        raise
    except Exception as error:
        _last_words(api, wire.Died("node", f"{type(error).__name__}: {error}"))
        raise
    finally:
        _last_words(worker, wire.Shutdown())


def _run(launch: Launch, inbox: Inbox, poller: Poller, clock: MonotonicClock) -> None:
    engine = inbox.wait_for_engine()
    if engine is None:
        return
    settings = node_settings(launch, engine)
    node = EngineNode(settings)
    peers = Peers(launch.incarnation, engine.layout, poller, inbox.report, clock=clock.now, note=logger.info)
    host = numeric_host(launch.config.host)
    replica = wire.ReplicaInfo(
        incarnation=launch.incarnation,
        role=launch.config.role,
        layout=engine.layout,
        layout_fields=engine.layout_fields,
        control_host=host,
        control_port=peers.listen(host) if launch.config.role == "prefill" else 0,  # decode dials, prefill answers
        shards=(engine.data,),
        http_port=launch.http_port,
    )
    inbox.meet(peers)
    recorder = _recorder(launch.config, settings, node)
    observers: list[Observer] = [recorder] if recorder is not None else []
    observers.append(
        logs.BatchLog(
            logger.info,
            lambda: logs.load_of(inspect.gauges(node)),
            shows_numbers=environment_switch("LOG_FORWARD_ITERS"),
        )
    )
    inbox.api.send(wire.NodeReady(replica, engine.num_pages, engine.page_bytes))
    inbox.flush()
    gc.collect()
    gc.freeze()  # what is here now stays; the collector need not look at it again
    try:
        drive(node, inbox, clock, observers=observers, answer=Questions(node).answer)
    finally:
        peers.close()
        if recorder is not None:
            recorder.close()


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
        raise ServerFailure(f"cannot write the flight record: {error}; choose another --flight-record") from error


def _last_words(channel: PolledChannel, message: msgspec.Struct) -> None:  # of any kind
    try:
        channel.send(message)
        channel.sock.setblocking(True)
        channel.sock.settimeout(1.0)
        channel.flush()
    except (ChannelClosed, OSError):
        pass  # nobody is there to hear them


def main() -> int:
    launch = read_launch()
    logs.set_up(launch.config.log_format, process="node")
    try:
        run(launch, api_fd=int(sys.argv[1]), worker_fd=int(sys.argv[2]))
    except (NeighbourLost, ServerFailure):
        return 1  # the parent has been told and says it to the user
    except Exception:
        logger.exception("the node met an error of ours")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
