"""Frozen settings of one router: every flag of `tandem router`, its default and its meaning."""

from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
from msgspec import structs

from tandem import otlp
from tandem.core.router.circuit_breaker import BreakerSettings
from tandem.core.router.routed_request import RequestSettings
from tandem.core.router.router import RouterSettings
from tandem.core.router.routing import CACHE_AWARE, POLICIES, PolicySettings
from tandem.core.router.worker_registry import HealthSettings, RegisteredWorker, WorkerId
from tandem.core.settings import Role
from tandem.core.values import MAX_TIMEOUT_SECONDS, MILLISECOND, SECOND, Nanos, ceil_div
from tandem.door_config import DOOR_RULES, TOO_LATE, DoorConfig, flag
from tandem.server.router.prompt_blocks import BLOCK_BYTES

USUAL = PolicySettings()
BREAKER = BreakerSettings()


@dataclass(frozen=True, slots=True)
class RouterConfig(DoorConfig):
    workers: tuple[RegisteredWorker, ...]
    fd: int | None = flag(
        None,
        "listen on this inherited file descriptor instead, a listening socket that outlives the router",
        metavar="N",
    )
    policy: str = flag("round_robin", "which worker of a role gets the next request", choices=tuple(POLICIES))
    prefill_policy: str | None = flag(None, "the same for prefills alone", choices=tuple(POLICIES))
    decode_policy: str | None = flag(None, "the same for decodes alone", choices=tuple(POLICIES))
    cache_threshold: float | None = flag(
        None, f"cache_aware: share of a prompt that a worker must have got before ({USUAL.cache_threshold})"
    )
    balance_abs_threshold: int | None = flag(
        None,
        "cache_aware: by how many prompts under way the workers of a role may differ before the least loaded gets the "
        f"next one ({USUAL.balance_abs_threshold}), if also",
        metavar="N",
    )
    balance_rel_threshold: float | None = flag(
        None, f"cache_aware: the most loaded has more than so many times the least ({USUAL.balance_rel_threshold})"
    )
    max_tree_size: int | None = flag(
        None,
        f"cache_aware: bytes of prompts that are remembered, per role ({USUAL.max_blocks * BLOCK_BYTES}); the oldest "
        "are forgotten first",
        metavar="N",
    )
    enable_igw: bool = flag(
        False,
        "workers may serve different models: ask each with its probes which (/v1/models, with the first API key), and "
        "send requests by their `model`",
    )
    disable_circuit_breaker: bool = flag(False, "workers whose requests fail get as many as before")
    cb_failure_threshold: int | None = flag(
        None,
        f"failures in a row after which a worker is left alone, where there is another ({BREAKER.failures})",
        metavar="N",
    )
    cb_success_threshold: int | None = flag(
        None, f"successes of a worker that is tried again until it is used as before ({BREAKER.successes})", metavar="N"
    )
    cb_timeout_duration_secs: float | None = flag(
        None, f"seconds until it is tried again ({BREAKER.timeout_ns // SECOND})"
    )
    cb_window_duration_secs: float | None = flag(
        None, f"seconds within which these failures come ({BREAKER.window_ns // SECOND})"
    )
    request_timeout: float = flag(
        600.0,
        "seconds until the first token, unless the request says otherwise, and then until a document ends",
    )
    stall_timeout: float = flag(35.0, "seconds between two pieces of a stream, and of silence of a dead worker")
    retries: int = flag(3, "further attempts with another pair, as long as the client has not got a byte")
    health_check_interval: float = flag(5.0, "seconds between two health checks of a live worker")
    max_active_requests: int = flag(4096, "requests under way; more are refused with 503")
    drain_timeout: float = flag(60.0, "seconds that running requests get after SIGTERM")
    fault_records: str | None = flag(
        None,
        "directory for what the router did last before a fault of ours, which is written then; off: nothing is kept "
        "(default: tandem/faults in this user's state directory)",
        metavar="DIR|off",
    )

    @property
    def policies(self) -> tuple[str, str]:
        """Of prefills, of decodes."""
        return self.prefill_policy or self.policy, self.decode_policy or self.policy

    @property
    def is_cache_aware(self) -> bool:
        return CACHE_AWARE in self.policies

    def _policy(self, name: str) -> PolicySettings:
        given: dict[str, float | None] = {
            "cache_threshold": self.cache_threshold,
            "balance_abs_threshold": self.balance_abs_threshold,
            "balance_rel_threshold": self.balance_rel_threshold,
            "max_blocks": None if self.max_tree_size is None else ceil_div(self.max_tree_size, BLOCK_BYTES),
        }
        return structs.replace(PolicySettings(name), **{key: it for key, it in given.items() if it is not None})

    def _breaker(self) -> BreakerSettings:
        given: dict[str, int | None] = {
            "failures": self.cb_failure_threshold,
            "successes": self.cb_success_threshold,
            "timeout_ns": None if self.cb_timeout_duration_secs is None else nanos(self.cb_timeout_duration_secs),
            "window_ns": None if self.cb_window_duration_secs is None else nanos(self.cb_window_duration_secs),
        }
        return structs.replace(BREAKER, **{key: it for key, it in given.items() if it is not None})

    def settings(self) -> RouterSettings:
        """The same numbers in the units of the core."""
        interval = nanos(self.health_check_interval)
        prefill_policy, decode_policy = map(self._policy, self.policies)
        return RouterSettings(
            request=RequestSettings(
                retries=self.retries, document_ns=nanos(self.request_timeout), gap_ns=nanos(self.stall_timeout)
            ),
            health=HealthSettings(interval_ns=interval, fast_interval_ns=min(interval, Nanos(500 * MILLISECOND))),
            max_active=self.max_active_requests,
            lost_ns=nanos(self.stall_timeout),
            prefill_policy=prefill_policy,
            decode_policy=decode_policy,
            breaker=None if self.disable_circuit_breaker else self._breaker(),
        )

    def violations(self) -> list[str]:
        """Why this router cannot start; all reasons together."""
        roles = [worker.role for worker in self.workers]
        urls = [worker.url for worker in self.workers]
        rules = (
            (Role.PREFILL not in roles, "at least one --prefill URL is needed"),
            (Role.DECODE not in roles, "at least one --decode URL is needed"),
            (len(set(urls)) < len(urls), "the same URL is named twice"),
            *self._policy_rules(),
            *self._breaker_rules(),
            (not 0 <= self.port < 1 << 16, "--port takes 0 to 65535"),
            (self.fd is not None and self.fd < 0, "--fd takes the number of an open file descriptor"),
            (self.request_timeout <= 0 or self.stall_timeout <= 0, "timeouts must be positive"),
            (max(self.request_timeout, self.stall_timeout, self.drain_timeout) > MAX_TIMEOUT_SECONDS, TOO_LATE),
            (self.health_check_interval <= 0, "--health-check-interval must be positive"),
            (
                max(self.health_check_interval, *self._breaker_seconds()) > MAX_TIMEOUT_SECONDS,
                "--health-check-interval, --cb-timeout-duration-secs and --cb-window-duration-secs are at most "
                f"{MAX_TIMEOUT_SECONDS:g}",
            ),
            (self.retries < 0 or self.drain_timeout < 0, "--retries and --drain-timeout must not be negative"),
            (
                bool(self.allow_credentials or self.allowed_methods or self.allowed_headers)
                and not self.allowed_origins,
                "--allow-credentials, --allowed-methods and --allowed-headers are for web pages of --allowed-origins: "
                "name one",
            ),
            (
                self.otlp_traces_endpoint != otlp.DEFAULT_ENDPOINT and not self.enable_trace,
                f"--otlp-traces-endpoint {otlp.UNUSED}",
            ),
            (self.max_active_requests < 1, "--max-active-requests must be at least 1"),
        )
        return [reason for is_broken, reason in rules if is_broken] + [r.reason for r in DOOR_RULES if r.broken(self)]

    def _policy_rules(self) -> list[tuple[bool, str]]:
        given = self._given("cache_threshold", "balance_abs_threshold", "balance_rel_threshold", "max_tree_size")
        settings = self._policy(CACHE_AWARE)
        return [
            (bool(given) and not self.is_cache_aware, f"{given}: only with a policy that is {CACHE_AWARE}"),
            (
                None not in (self.prefill_policy, self.decode_policy) and self.policy != USUAL.name,
                "--policy does nothing where both --prefill-policy and --decode-policy are given",
            ),
            (not 0 <= settings.cache_threshold <= 1, "--cache-threshold takes 0 to 1"),
            (
                settings.balance_abs_threshold < 0 or settings.balance_rel_threshold < 1,
                "--balance-abs-threshold must not be negative, --balance-rel-threshold at least 1",
            ),
            (settings.max_blocks < 1, "--max-tree-size must be positive"),
        ]

    def _breaker_rules(self) -> list[tuple[bool, str]]:
        names = ("failure_threshold", "success_threshold", "timeout_duration_secs", "window_duration_secs")
        given = self._given(*(f"cb_{name}" for name in names))
        counts = [n for n in (self.cb_failure_threshold, self.cb_success_threshold) if n is not None]
        return [
            (bool(given) and self.disable_circuit_breaker, f"{given}: not with --disable-circuit-breaker"),
            (min(counts, default=1) < 1, "thresholds of the circuit breaker must be at least 1"),
            (min(self._breaker_seconds()) * SECOND < 1, "durations of the circuit breaker must be positive"),
        ]

    def _breaker_seconds(self) -> list[float]:
        """Its durations, one that is not given as 1."""
        return [1.0 if s is None else s for s in (self.cb_timeout_duration_secs, self.cb_window_duration_secs)]

    def _given(self, *names: str) -> str:
        """Those flags that have a value, as they are written."""
        return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None)


def nanos(seconds: float) -> Nanos:
    return Nanos(round(seconds * SECOND))


def make_worker(index: int, role: Role, url: str, bootstrap_port: int | None = None) -> RegisteredWorker:
    """Of an URL in whatever spelling. Raises ValueError with a sentence for the user when `url` is none."""
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
    except ValueError as error:
        raise ValueError(f"{url} is not the URL of a server ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url} is not the URL of a server, like http://127.0.0.1:30001")
    if "@" in parts.netloc:
        raise ValueError(f"the URL of {parts.hostname} has a name or a password in it, which logs would show")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{url} has no valid port") from None
    if port is None:
        raise ValueError(f"{url} names no port")
    if port == 0:
        raise ValueError(f"{url} has no valid port")
    spelt = f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"
    if host_asked_at(spelt) != parts.hostname:
        raise ValueError(f"{url} is not the URL of a server: nobody can be asked there")
    return RegisteredWorker(WorkerId(index), role, spelt, host, bootstrap_port)


def host_asked_at(url: str) -> str | None:
    """As the client that asks workers reads it; None where it cannot, so that no probe would ever end."""
    try:
        return httpx.URL(url).host
    except (httpx.InvalidURL, UnicodeError):  # the latter of a name that is no IDNA
        return None
