"""A server with the prefill delayer: the same tokens, fewer and larger prompt batches, and metrics that tell of it."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import pytest
from cluster import Cluster, Server, cluster, eventually

FLAGS = (
    "--enable-prefill-delayer",
    *("--prefill-delayer-queue-min-ratio", "0.5"),
    *("--prefill-delayer-max-delay-ms", "500"),
    *("--prefill-delayer-max-delay-passes", "40"),
    *("--prefill-delayer-forward-passes-buckets", "2", "10", "90"),
    *("--prefill-delayer-wait-seconds-buckets", "0.05", "2.5"),
)
CLIENTS, ROUNDS = 8, 4
ANY_PASSES = ("--prefill-delayer-max-delay-passes", "1000000")
LOOKED_BACK = 16  # prompt batches, by which the delayer knows how large they usually are


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with cluster(unified=True, flags=FLAGS) as it:
        assert it.unified is not None
        yield it.unified


def ask(server: Server, number: int) -> list[int]:
    prompt = list(range(20 + number, 60 + number))
    asked = {"ignore_eos": True, "min_new_tokens": 1}
    reply = server.generate(prompt, max_new_tokens=8 + 9 * number % 31, sampling_params=asked)
    tokens: list[int] = reply["output_ids"]
    return tokens


def metrics(server: Server) -> dict[str, float]:
    with server.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_prompts_wait_for_each_other_and_nobody_gets_other_tokens(server: Server) -> None:
    alone = [ask(server, number) for number in range(CLIENTS * ROUNDS)]
    assert ask_until_some_wait(server) == alone
    found = metrics(server)
    count = sum(value for key, value in found.items() if "delayer_wait_seconds_count" in key)
    at_once = sum(value for key, value in found.items() if re.search(r'delayer_wait_seconds_bucket.*le="0\.0"', key))
    assert 0 < at_once < count, "some prompt batches waited, and some did not"
    waited_s = sum(value for key, value in found.items() if "delayer_wait_seconds_sum" in key)
    assert 0 < waited_s < 1.0 * count
    assert sum(value for key, value in found.items() if "inter_token_latency_seconds_count" in key) > 0


def ask_together(server: Server) -> list[list[int]]:
    """Eight at a time."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(lambda number: ask(server, number), range(CLIENTS * ROUNDS)))


def ask_until_some_wait(server: Server) -> list[list[int]]:
    """Again where each had its answer before the next came, as may be on a fast machine. The last answers"""
    answers = ask_together(server)
    for _ in range(30):
        if delays(server):
            return answers
        answers = ask_together(server)
    raise AssertionError(f"nobody waits: {passes(server)}")


@contextmanager
def another(*flags: str) -> Iterator[Server]:
    with cluster(
        unified=True, flags=("--enable-prefill-delayer", "--prefill-delayer-queue-min-ratio", "0.5", *flags)
    ) as it:
        assert it.unified is not None
        yield it.unified


def test_nobody_waits_for_more_batches_than_the_flag_says() -> None:
    """Two allowed passes are one denial at most."""
    with another("--prefill-delayer-max-delay-passes", "2") as server:
        ask_until_some_wait(server)
        found = metrics(server)
    (count,) = (value for key, value in found.items() if "delayer_wait_forward_passes_count" in key)
    (at_once,) = (value for key, value in found.items() if re.search(r'wait_forward_passes_bucket.*le="0\.0"', key))
    (by_one,) = (value for key, value in found.items() if re.search(r'wait_forward_passes_bucket.*le="1\.0"', key))
    assert at_once < by_one == count


@pytest.mark.slow
def test_below_the_watermark_nobody_waits() -> None:
    with another("--prefill-delayer-token-usage-low-watermark", "1") as server:
        ask_together(server)
        found = metrics(server)
    reasons = {re.search(r'output_reason="(\w*)"', key) for key in found if "delayer_outcomes_total" in key}
    named = {reason.group(1) for reason in reasons if reason is not None}
    assert "token_watermark" in named
    assert "delay" not in named


def test_the_histograms_have_the_bounds_that_the_flags_name(server: Server) -> None:
    """90 batches are more than anybody waits for; 0 and the last pass are there anyway."""
    bounds = re.compile(r'sglang:prefill_delayer_wait_(\w+)_bucket.*le="([^"]*)"')
    found = [match.groups() for match in map(bounds.match, metrics(server)) if match is not None]
    assert [bound for unit, bound in found if unit == "forward_passes"] == ["0.0", "2.0", "10.0", "39.0", "+Inf"]
    assert [bound for unit, bound in found if unit == "seconds"] == ["0.0", "0.05", "2.5", "+Inf"]


@pytest.mark.slow
def test_a_server_whose_ratio_is_found_out_says_so_and_changes_no_token(common: Cluster) -> None:
    flags = ("--enable-prefill-delayer", "--prefill-delayer-queue-min-ratio", "auto")
    plain = common.unified
    assert plain is not None
    alone = [ask(plain, number) for number in range(CLIENTS * ROUNDS)]
    with cluster(unified=True, flags=flags) as it, ThreadPoolExecutor(CLIENTS) as clients:
        server = it.unified
        assert server is not None
        assert server.call("GET", "/server_info")["prefill_delayer_queue_min_ratio"] == "auto"
        assert tuned(server) == {"batch_cost_seconds": 0, "wanted_reqs": 0}, "nothing is measured yet"
        # Prompts of several lengths, one after the other: what a batch costs beside its tokens can be told from them.
        for number, size in enumerate((20, 100, 20, 100, 20, 100)):
            server.generate([300 + number] * size, max_new_tokens=1)
        measured = server.state()["costs"]["prompt_batch_us"]
        assert tuned(server)["batch_cost_seconds"] == pytest.approx(measured / 1e6)
        assert list(clients.map(lambda number: ask(server, number), range(CLIENTS * ROUNDS))) == alone


def tuned(server: Server) -> dict[str, float]:
    found = {key: value for key, value in metrics(server).items() if key.startswith("tandem:prefill_delayer_")}
    return {key.partition("{")[0].removeprefix("tandem:prefill_delayer_"): value for key, value in found.items()}


@pytest.mark.slow
def test_no_more_prompts_than_the_flag_says_share_a_batch() -> None:
    with cluster(unified=True, flags=("--prefill-max-requests", "2")) as it:
        server = it.unified
        assert server is not None
        prompts = [[number] * 20 for number in range(20, 28)]
        server.call("POST", "/generate", {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}})
        server.state()  # what its node has told by then, it has logged
        assert set(re.findall(r"Prefill batch.*#new-seq: (\d+)", server.log)) <= {"1", "2"}
        assert "#new-seq: 2" in server.log


# --- one gate at a time: prompts that come while streams run that do not end -----------------------------------------


def two_together(server: Server) -> None:
    """Until two prompts were in one batch. No gate closes meanwhile: of two the second waits behind one that runs."""
    numbers = iter(range(20, 400))

    def shared_a_batch() -> bool:
        prompts = [[number] * 20 for number in (next(numbers), next(numbers))]
        server.call("POST", "/generate", {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}})
        return "#new-seq: 2" in server.log

    eventually(shared_a_batch, what=lambda: server.log)


@contextmanager
def streams(server: Server, number: int) -> Iterator[None]:
    """So many rows decode meanwhile; at the end they still do."""
    running = [
        server.stream([450 - at] * 20, max_new_tokens=8000, sampling_params={"ignore_eos": True})
        for at in range(number)
    ]
    try:
        eventually(lambda: num_running(server) == number, what=server.state)
        yield
        assert num_running(server) == number
    finally:
        for one in running:
            one.close()


def num_running(server: Server) -> float:
    (found,) = (value for key, value in metrics(server).items() if key.startswith("sglang:num_running_reqs{"))
    return found


def total(server: Server, name: str, labels: str = "") -> float:
    return sum(value for key, value in metrics(server).items() if f"prefill_delayer_{name}{{" in key and labels in key)


def passes(server: Server) -> dict[tuple[str, str], float]:
    """How many there were, by what was decided and why."""
    found: dict[tuple[str, str], float] = {}
    pattern = re.compile(r'sglang:prefill_delayer_outcomes_total{.*output_allow="(\w+)".*output_reason="(\w*)"')
    for key, value in metrics(server).items():
        if (match := pattern.match(key)) is not None:
            found[match[1], match[2]] = found.get((match[1], match[2]), 0) + value
    return found


def delays(server: Server) -> float:
    return total(server, "outcomes_total", 'output_reason="delay"')


@contextmanager
def beside_streams(number: int, *flags: str) -> Iterator[Server]:
    """A server that has had two prompts in one batch, and then one that a gate closes on: the first is let through."""
    with cluster(unified=True, flags=("--enable-prefill-delayer", *ANY_PASSES, *flags)) as it:
        server = it.unified
        assert server is not None
        two_together(server)
        with streams(server, number):
            before = delays(server)
            server.generate([7] * 20, max_new_tokens=1)
            assert delays(server) == before
            yield server


def test_a_prompt_waits_for_others_no_longer_than_the_flag_says() -> None:
    """Two run, so two should wait, and one does."""
    flags = ("--prefill-delayer-queue-min-ratio", "1", "--prefill-delayer-max-delay-ms", "400")
    with beside_streams(2, *flags) as server:
        before, waited_s, passed = delays(server), total(server, "wait_seconds_sum"), passes(server)
        server.generate([8] * 20, max_new_tokens=1)
        assert delays(server) > before
        grown = {what for what, number in passes(server).items() if number > passed.get(what, 0)}
        assert {what for what in grown if what[1]} == {("false", "delay"), ("true", "wait_success")}
        assert 0.4 <= total(server, "wait_seconds_sum") - waited_s < 5.0, "which it is where no flag is given"


def test_a_prompt_that_waits_begins_when_as_many_wait_as_the_ratio_wants() -> None:
    """Nothing else lets it begin: no bound is reached, and those who run go on."""
    flags = ("--prefill-delayer-queue-min-ratio", "1", "--prefill-delayer-max-delay-ms", "60000")
    with beside_streams(2, *flags) as server, ThreadPoolExecutor(1) as pool:
        before = delays(server)
        first = pool.submit(server.generate, [8] * 20, max_new_tokens=1)
        eventually(lambda: delays(server) > before + LOOKED_BACK, what=server.state)
        assert not first.done()
        logged = len(server.log)
        server.generate([9] * 20, max_new_tokens=1)
        assert first.result()["meta_info"]["completion_tokens"] == 1
        server.state()  # what its node has told by then, it has logged
        assert re.findall(r"Prefill batch.*#new-seq: (\d+)", server.log[logged:]) == ["2"]


@pytest.mark.slow
def test_a_prompt_waits_for_the_slots_of_a_usual_batch_whatever_time_has_passed() -> None:
    """One slot is free, and a batch had two prompts: until so many passes have seen no other like that. A delay of a
    millisecond is over before."""
    flags = ("--prefill-delayer-queue-min-ratio", "0.01", "--prefill-delayer-max-delay-ms", "1")
    bounds = ("--prefill-delayer-forward-passes-buckets", "7", str(LOOKED_BACK))
    with beside_streams(3, "--max-running-requests", "4", *flags, *bounds) as server:
        before = delays(server)
        few, usual = (total(server, "wait_forward_passes_bucket", f'le="{most}.0"') for most in (7, LOOKED_BACK))
        server.generate([8] * 20, max_new_tokens=1)
        assert total(server, "wait_forward_passes_bucket", 'le="7.0"') == few
        assert total(server, "wait_forward_passes_bucket", f'le="{LOOKED_BACK}.0"') == usual + 1
        assert 7 < delays(server) - before <= LOOKED_BACK


def test_without_the_flag_nothing_of_it_is_counted(common: Cluster) -> None:
    server = common.unified
    assert server is not None
    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(lambda number: ask(server, number), range(CLIENTS)))
    assert not [key for key in metrics(server) if "prefill_delayer" in key]


# --- what the delayer is there for -----------------------------------------------------------------------------------

ROWS = 32  # that run at a time, by default
PROMPT_BATCH_MS, DECODE_BATCH_MS = 190, 9  # what they cost the model of the report (`bench/delayer.py`)


@pytest.mark.slow
def test_who_ends_alone_is_followed_by_a_prompt_batch_of_its_own(common: Cluster) -> None:
    """All wait from the start, in one queue: those that end together are followed by one batch of prompts. Of equally
    long answers 32 do, of unequal ones hardly any, and what batches cost then is most of the output throughput."""
    server = common.unified
    assert server is not None
    equal, unequal = ([Random(number).randint(least, 60) for number in range(4 * ROWS)] for least in (60, 20))
    batches, decodes = batches_for(server, equal)
    more_batches, more_decodes = batches_for(server, unequal)
    assert batches < more_batches / 4
    took_ms, took_longer_ms = (
        prompts * PROMPT_BATCH_MS + others * DECODE_BATCH_MS
        for prompts, others in ((batches, decodes), (more_batches, more_decodes))
    )
    assert sum(unequal) / took_longer_ms < 0.6 * sum(equal) / took_ms


def batches_for(server: Server, lengths: list[int]) -> tuple[int, int]:
    """Of prompts, and of tokens after them, until all answers have these lengths."""
    eventually(server.is_idle, what=server.state)
    logged, launched = server.log.count("Prefill batch"), server.state()["forward_ct"]
    prompts = [[20 + number] * 12 for number in range(len(lengths))]
    sampling = [{"temperature": 0, "ignore_eos": True, "max_new_tokens": length} for length in lengths]
    answers = server.call("POST", "/generate", {"input_ids": prompts, "sampling_params": sampling})
    assert [len(answer["output_ids"]) for answer in answers] == lengths
    eventually(server.is_idle, what=server.state)
    batches = server.log.count("Prefill batch") - logged
    return batches, server.state()["forward_ct"] - launched - batches
