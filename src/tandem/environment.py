"""The environment variables of servers: `TANDEM_<name>`, or `SGLANG_<name>` where that is not set. Read at start."""

import os
from dataclasses import dataclass
from difflib import get_close_matches

API_KEY, ADMIN_API_KEY = "TANDEM_API_KEY", "TANDEM_ADMIN_API_KEY"
NATIVE = "TANDEM_NATIVE"  # what `engine.native`, which stands alone, reads
NEARLY = 0.85  # of two names: how alike they are where one may be a slip of the other

SWITCHED = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable, `TANDEM_<name>` with `SGLANG_<name>` as an alias, which is read at start."""

    name: str
    text: str
    default: float = 0.0
    least: float = 0.0
    most: float = 1e9
    is_switch: bool = False
    is_whole: bool = False


LOG_FORWARD_ITERS = Variable("LOG_FORWARD_ITERS", "batch log lines show the batch's number", is_switch=True)
FORCE_QUERY = Variable(
    "DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK",
    "set on both halves: with several DP ranks prefill announces, and decode asks for, that of every request",
    is_switch=True,
)
BOOTSTRAP_TIMEOUT = Variable(
    "DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    "seconds that prefill waits for READY; 0: until the request's deadline, which a longer time does not extend",
)
WAITING_TIMEOUT = Variable(
    "DISAGGREGATION_WAITING_TIMEOUT",
    "seconds that decode, having said READY, waits for the KV; 0: until the request's deadline, as above",
)
HEARTBEAT_INTERVAL = Variable(
    "DISAGGREGATION_HEARTBEAT_INTERVAL",
    "seconds without a word until a peer is pinged; each side tells the other its own",
    default=1.0,
    least=0.1,
    most=60.0,
)
HEARTBEAT_MAX_FAILURE = Variable(
    "DISAGGREGATION_HEARTBEAT_MAX_FAILURE",
    "pings that may be missing; a peer that is silent for one interval more is lost, one that closes is at once",
    default=4,
    least=1,
    most=1000,
    is_whole=True,
)
# The test hooks of the reports, as they are at the start.
FORCED_RETRIES = Variable(
    "TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB", "test hook: share of requests that are prefilled twice", most=1.0
)
FAILED_TRANSFERS = Variable(
    "TEST_DISAGG_FAILURE_PROB", "test hook: share of transfers that fail, on each half", most=1.0
)
FAULT_SEED = Variable(
    "TEST_FAULT_SEED", "test hook: says which transfers those are; 0: drawn", is_whole=True, most=2.0**53
)

STAGED_KV = Variable(
    "TEST_STAGED_KV",
    "test hook: KV in memory that is not shared, as on a GPU, so that its pages travel by way of copies (`sock`)",
    is_switch=True,
)

ENGINES = Variable(
    "ENGINES",
    "engines that share the cores of this machine; `tandem up` and `tandem demo` set it for their servers",
    default=1,
    least=1,
    most=1000,
    is_whole=True,
)

ENVIRONMENT = (
    LOG_FORWARD_ITERS,
    FORCE_QUERY,
    BOOTSTRAP_TIMEOUT,
    WAITING_TIMEOUT,
    HEARTBEAT_INTERVAL,
    HEARTBEAT_MAX_FAILURE,
    FORCED_RETRIES,
    FAILED_TRANSFERS,
    FAULT_SEED,
    STAGED_KV,
    ENGINES,
)


def environment_name(variable: Variable) -> str:
    """Under which it is read."""
    ours, alias = f"TANDEM_{variable.name}", f"SGLANG_{variable.name}"
    return alias if os.environ.get(alias) and not os.environ.get(ours) else ours


def environment_text(variable: Variable) -> str:
    """As it is set; empty: not set."""
    return os.environ.get(environment_name(variable), "")


def environment_switch(variable: Variable) -> bool:
    """Raises ValueError with a sentence."""
    text = environment_text(variable)
    found = SWITCHED.get(text.lower(), None if text else bool(variable.default))
    if found is None:
        raise ValueError(f"the environment variable {environment_name(variable)} must be 1 or 0, not {text!r}")
    return found


def environment_number(variable: Variable) -> float:
    """Raises ValueError with a sentence."""
    text = environment_text(variable)
    kind = "a whole number" if variable.is_whole else "a number"
    try:
        value = float(text) if text else variable.default
    except ValueError:
        value = None
    is_fine = value is not None and variable.least <= value <= variable.most
    if value is None or not is_fine or (variable.is_whole and value != int(value)):
        span = f"from {variable.least:g} to {variable.most:g}"
        raise ValueError(f"the environment variable {environment_name(variable)} must be {kind} {span}, not {text!r}")
    return value


def environment_complaints() -> list[str]:
    """What is wrong with the environment, a sentence each."""
    found: list[str] = []
    for variable in ENVIRONMENT:
        try:
            environment_switch(variable) if variable.is_switch else environment_number(variable)
        except ValueError as error:
            found.append(str(error))
    return found


def misspelt() -> list[str]:
    """What nobody reads and is nearly a name that is read, a sentence each. Of others nothing is said: whoever starts
    servers may put anything there (`TANDEM_PORT` is Kubernetes's, where a service is called tandem).
    """
    known = [API_KEY, ADMIN_API_KEY, NATIVE, *(f"TANDEM_{variable.name}" for variable in ENVIRONMENT)]
    unknown = sorted(name for name in os.environ if name.startswith("TANDEM_") and name not in known)
    meant = ((name, get_close_matches(name, known, n=1, cutoff=NEARLY)) for name in unknown)
    return [f"the environment variable {name} is not read; {one} is" for name, found in meant for one in found]
