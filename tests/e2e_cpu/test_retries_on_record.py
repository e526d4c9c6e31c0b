"""Retries of a prefill and what goes with them, as answers, metrics and flight records of a pair tell of them.

A record done again has the node of a real server after each of its steps: what it holds between two answers.
"""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any  # JSON documents

import pytest
from cluster import HttpError, Server, bootstrap_port, eventually, frozen, halves
from test_pd_equals_unified import gauge

from tandem.core.commands import LaunchBatch
from tandem.core.disagg.sides import DecodeSide, PrefillSide
from tandem.core.disagg.transfer_state import TransferState
from tandem.core.events import BatchReturned
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.request_state import Progress, State
from tandem.server.node.flight import ReplayedStep
from tandem.server.node.record import records_at, steps_from

CHUNK, RETRIES = 64, 2
COMMON = ("--deterministic", "--enable-fault-injection")
OF_PREFILL = ("--optimistic-prefill-retries", str(RETRIES), "--chunked-prefill-size", str(CHUNK))
OF_DECODE = ("--max-total-tokens", "640", "--schedule-conservativeness", "0")
rooms = count(1)


@dataclass
class Pair:
    prefill: Server
    decode: Server
    records: dict[str, Path]

    def fields(self) -> dict[str, Any]:
        """That send both halves of a request to each other."""
        at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(self.prefill)}
        return {**at, "bootstrap_room": next(rooms), "timeout": 20}

    def generate(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """Through both halves, sent at the same time: decode's answer."""
        fields |= self.fields()
        with ThreadPoolExecutor(1) as pool:
            half = pool.submit(self.prefill.generate, prompt, **fields)
            answer = self.decode.generate(prompt, **fields)
            half.result()
        return answer

    def generate_after_ready(self, prompt: Sequence[int], **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Prefill gets its half when decode has said READY for it: the answers of both."""
        fields |= self.fields()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.decode.generate, prompt, **fields)
            eventually(lambda: self.prefill.state()["stashed"] == 1, what=self.prefill.state)
            half = self.prefill.generate(prompt, **fields)
            return half, answer.result()

    def come_to_rest(self) -> None:
        for server in (self.prefill, self.decode):
            eventually(server.is_idle, what=server.state)

    def forget_prefixes(self) -> None:
        self.come_to_rest()
        for server in (self.prefill, self.decode):
            server.open("POST", "/flush_cache").close()

    def steps(self, server: Server) -> Iterator[tuple[ReplayedStep, EngineNode]]:
        """What its node has done until now, done again."""
        (record,) = records_at(self.records["prefill" if server is self.prefill else "decode"])
        for step in steps_from(record, 0, EngineNode):
            assert isinstance(step.node, EngineNode)
            assert step.is_as_recorded
            yield step, step.node

    def progress(self, server: Server, rid: str) -> Iterator[tuple[Progress, EngineNode]]:
        """Of one request, after each step."""
        for _, node in self.steps(server):
            yield from ((it, node) for it in node.state.requests.values() if it.request.rid == rid)


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    records = {name: folder / name for name in ("prefill", "decode")}
    kept = {name: ("--flight-record", str(path)) for name, path in records.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_LOG_FORWARD_ITERS", "true")
        flags = (*COMMON, *OF_PREFILL, *kept["prefill"]), (*COMMON, *OF_DECODE, *kept["decode"])
        with halves(folder, *flags) as (prefill, decode):
            yield Pair(prefill, decode, records)


def in_state(server: Server, state: State) -> int:
    return len(server.state()["queues"].get(str(state), ()))


def retries(server: Server, reason: str) -> float:
    return gauge(server, "num_prefill_retries_total", f'reason="{reason}"')


@contextmanager
def faults(server: Server, **probabilities: float) -> Iterator[None]:
    server.call("PUT", "/debug/faults", probabilities)
    try:
        yield
    finally:
        server.call("PUT", "/debug/faults", dict.fromkeys(probabilities, 0.0))


def test_a_ready_that_comes_before_its_request_is_taken_up_and_nothing_is_computed_twice(it: Pair) -> None:
    """Decode would say it again; until then prefill would compute the prompt as often as it may."""
    prompt = [40 + number % 400 for number in range(100)]
    before = retries(it.prefill, "not_ready")
    _, ours = it.generate_after_ready(prompt, max_new_tokens=8)
    assert (ours["meta_info"]["path"], retries(it.prefill, "not_ready") - before) == ("remote", 0)
    it.forget_prefixes()
    assert it.decode.generate(prompt, max_new_tokens=8)["output_ids"] == ours["output_ids"]


def test_a_retry_is_first_in_the_queue_with_its_row_and_without_pages(it: Pair) -> None:
    """Others came to the queue before it went back there."""
    attempts = (f"attempt-{number}" for number in count())
    behind: list[str] = []

    def is_requeued_before_another() -> bool:
        name = next(attempts)
        retry_before_others(it, name)
        for progress, node in it.progress(it.prefill, name):
            if progress.state is not State.QUEUED or not is_retried(progress):
                continue
            assert progress.pages == []
            assert progress.id in node.state.results.owners
            queue = [node.state.requests[request] for request in node.state.queues[State.QUEUED]]
            fresh = [one.request.rid for one in queue if not is_retried(one)]
            assert [one.request.rid for one in queue][len(queue) - len(fresh) :] == fresh
            behind.extend(fresh)
        return bool(behind)

    eventually(is_requeued_before_another, within_s=60, what=it.prefill.state)


def is_retried(progress: Progress) -> bool:
    return isinstance(progress.side, PrefillSide) and progress.side.prefill_retry_count > 0


def retry_before_others(it: Pair, name: str) -> None:
    """Three halves without a decode, until none has a retry left: nothing is held then but what is cached."""
    it.forget_prefixes()
    halves: list[HTTPConnection] = []
    with frozen(it.prefill, "worker_process"):
        for number in range(3):
            prompt, rid = [300 + number, *range(30, 30 + 6 * CHUNK)], name if number == 0 else f"{name}-{number}"
            halves.append(it.prefill.open_stream(prompt, bootstrap_room=next(rooms), rid=rid))
            eventually(lambda number=number: in_state(it.prefill, State.QUEUED) == number, what=it.prefill.state)
            eventually(lambda: in_state(it.prefill, State.COMPUTING) == 1, what=it.prefill.state)
    eventually(lambda: in_state(it.prefill, State.BOOTSTRAPPING) == 3, what=it.prefill.state)
    assert gauge(it.prefill, "num_used_tokens") == 0
    for half in halves:
        half.close()


def test_a_retry_begins_its_stages_anew_and_nobody_else_has_them(it: Pair) -> None:
    prompt, pair, rid = [33] * 300, it.fields(), "retried"
    it.forget_prefixes()
    before = retries(it.prefill, "not_ready")
    with ThreadPoolExecutor(1) as pool:
        half = pool.submit(it.prefill.generate, prompt, rid=rid, **pair)
        eventually(lambda: retries(it.prefill, "not_ready") == before + RETRIES, what=it.prefill.state)
        eventually(lambda: in_state(it.prefill, State.BOOTSTRAPPING) == 1, what=it.prefill.state)
        with pytest.raises(HttpError) as refused:
            it.prefill.generate(prompt[:50], rid=rid, bootstrap_room=next(rooms))
        assert (refused.value.status, refused.value.error["code"]) == (409, "duplicate_rid")
        beside, _ = it.generate_after_ready(prompt[::2], max_new_tokens=1)
        it.decode.generate(prompt, max_new_tokens=1, **pair)
        retried = half.result()
    after, _ = it.generate_after_ready(prompt[::3], max_new_tokens=1, rid=rid)
    assert {"prefill_retried", "prefill_bootstrap", "prefill_forward"} <= ledger(retried)
    for one in (beside, after):
        assert "prefill_forward" in ledger(one)
        assert ledger(one).isdisjoint({"prefill_retried", "prefill_bootstrap"})
    assert len({progress.deadline for progress, _ in it.progress(it.prefill, rid)}) == 2, "one for each of the two"


def ledger(answer: dict[str, Any]) -> set[str]:
    """The stages of the time to its first token. What would be counted twice makes the last of them negative."""
    found: dict[str, float] = answer["meta_info"]["ttft_ledger"]
    assert min(found.values()) >= 0, found
    return set(found)


def test_who_is_forced_and_then_pushed_back_is_retried_once_and_gets_the_tokens_of_one_engine(it: Pair) -> None:
    """The hook chooses every request. Decode has not enough room for what they say together."""
    prompts = [[30 + 9 * number, *range(60, 100 + 7 * number)] for number in range(6)]
    sampling = {"ignore_eos": True, "max_new_tokens": 90}

    def ask(prompt: list[int]) -> list[int]:
        answer: list[int] = it.generate(prompt, sampling_params=sampling)["output_ids"]
        return answer

    alone = [it.decode.generate(prompt, sampling_params=sampling)["output_ids"] for prompt in prompts]
    pushed_back = gauge(it.decode, "num_retracted_requests_total")
    with faults(it.prefill, force_optimistic_prefill_retry_prob=1.0):
        for _ in range(20):  # on a busy machine some may have ended before the others come
            it.forget_prefixes()
            forced = retries(it.prefill, "forced")
            with ThreadPoolExecutor(len(prompts)) as pool:
                assert list(pool.map(ask, prompts)) == alone
            assert retries(it.prefill, "forced") == forced + len(prompts)
            if gauge(it.decode, "num_retracted_requests_total") > pushed_back:
                break
        else:
            pytest.fail("nobody was ever pushed back")
    assert retries(it.decode, "forced") == 0
    it.come_to_rest()


def test_transfers_wait_for_ready_and_then_for_pages_and_those_that_fail_have_failed(it: Pair) -> None:
    it.forget_prefixes()
    it.generate([44] * 100, rid="good")
    with faults(it.decode, disagg_failure_prob=1.0):
        assert it.generate([45] * 100, rid="bad")["meta_info"]["path"] == "fallback"
    half = it.prefill.open_stream([46] * 100, bootstrap_room=next(rooms), rid="alone")
    eventually(lambda: in_state(it.prefill, State.BOOTSTRAPPING) == 1, what=it.prefill.state)
    half.close()
    it.come_to_rest()
    assert transfer_states(it, it.prefill, "alone") == [TransferState.BOOTSTRAPPING]
    for server in (it.prefill, it.decode):
        good, bad = (transfer_states(it, server, rid) for rid in ("good", "bad"))
        assert TransferState.WAITING_FOR_INPUT in good
        assert TransferState.FAILED not in good
        assert bad[-1] is TransferState.FAILED


def transfer_states(it: Pair, server: Server, rid: str) -> list[TransferState]:
    """In order, each once, as long as it is a transfer."""
    sides = (progress.side for progress, _ in it.progress(server, rid))
    return list(dict.fromkeys(side.state for side in sides if isinstance(side, PrefillSide | DecodeSide)))


def test_a_batch_returns_under_the_number_of_its_launch_which_its_line_has(it: Pair) -> None:
    for number in range(3):
        it.generate([50 + number] * 200)
    it.come_to_rest()
    launched: dict[int, int] = {}
    logged: list[int] = []
    for step, _ in it.steps(it.prefill):
        for event in step.input.happened:
            if isinstance(event, BatchReturned):
                assert event.outcome.iteration == launched[event.outcome.batch]
                logged.append(event.outcome.iteration)
        plans = [command.plan for command in step.got.commands if isinstance(command, LaunchBatch)]
        launched |= {plan.id: plan.iteration for plan in plans}
    found = [int(number) for number in re.findall(r"Prefill batch \[(\d+)\]", it.prefill.log)]
    assert len(found) > 3
    assert found == [number for number in logged if number in found]
