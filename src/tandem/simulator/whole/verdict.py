"""What each request of a client has to end with: right tokens or one named cause, in time."""

from typing import Any  # JSON documents

from tandem.core.values import SECOND, Cause
from tandem.server.api.errors import RULES, Problem
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.clients import Answer, Conduct, said_in
from tandem.simulator.whole.faults import Faults
from tandem.simulator.whole.forms import check_form
from tandem.simulator.whole.vectors import VectorAsk, check_vectors

STALL_S = 9.0  # the longest gap that the flags of `options.py` allow: the router's
FLOW_S = 1.0  # of a stream that is looked at: much longer than anything is on its way
GRACE_S = 1.5  # the second of the promise, and what the network takes
LANDING = "landing"  # the wait for pages that are being pulled
SILENT = "the node kept silent"  # by `live_requests.py`
PATIENT_S = 10.0  # longer than any prompt of `options.py` waits for its turn on prefill
VERY_PATIENT_S = 20.0  # longer than all requests of `options.py` take, one after the other
KNOWN = {str(code): rule for code, rule in RULES.items()}
NEVER = {str(code) for code, rule in RULES.items() if rule.status < 500 and code is not Cause.ABORTED} | {
    str(Problem.INTERNAL),
    str(Cause.LAYOUT_MISMATCH),
    str(Cause.INVALID_LOGITS),
}  # of requests that are in order


def check(answer: Answer, faults: Faults) -> None:
    """Raises Violation."""
    ended_ns = answer.began_ns + int((answer.ended_s or 0) * SECOND)
    is_disturbed = faults.was_disturbed(faults.cluster.front.name, answer.began_ns, ended_ns)
    is_patient = answer.ask.conduct is Conduct.PATIENT
    error, what = answer.error, f"{answer.ask.path} {answer.ask.rid} {answer.ask.conduct.value}"
    if error is not None:
        _check_error(answer, error, what)
        if str(error.get("message")).endswith(SILENT) and not faults.may_silence():
            raise Violation("W4", f"{what}: {error}, and every node could speak")
        is_late = error.get("code") == Cause.DEADLINE_EXCEEDED
        patience_s = PATIENT_S if error.get("stage") == LANDING else VERY_PATIENT_S
        gives_way = is_late and faults.options.has_priorities  # to any number of others
        is_held_up = gives_way or faults.was_slow(answer.began_ns, ended_ns)
        if is_late and answer.ask.timeout_s >= patience_s and not is_held_up:
            raise Violation("L5", f"{what}: {error}, and nothing has held it up")
        is_one_too_many = faults.options.is_crowded and error.get("code") in (Problem.BUSY, Cause.QUEUE_FULL)
        if is_patient and not faults.options.faults and not gives_way and not is_one_too_many:
            raise Violation("S12", f"{what}: {error}, and nothing had gone wrong")
    elif answer.is_whole and answer.status == 200:
        _check_tokens(answer, what)
    elif is_patient and not (is_disturbed and (not answer.has_given_up or faults.was_slow(answer.began_ns, ended_ns))):
        raise Violation("S12", f"{what}: no end: {answer.status} {answer.trouble} {bytes(answer.body[-200:])!r}")
    if is_patient and not is_disturbed:
        _check_time(answer, what)
    if is_patient and not faults.has_cause(answer.began_ns, True):
        _check_flow(answer, what, faults.options.base_s, faults.options.block_tokens)


def _check_error(answer: Answer, error: dict[str, Any], what: str) -> None:
    code = str(error.get("code"))
    if code not in KNOWN:
        raise Violation("S12", f"{what}: {code} is no code of docs/errors.md: {error}")
    if code in NEVER:
        raise Violation("S12", f"{what}: {error}")
    if answer.status not in (200, KNOWN[code].status):
        raise Violation("S12", f"{what}: {code} with {answer.status}")


def _check_tokens(answer: Answer, what: str) -> None:
    if isinstance(answer.ask, VectorAsk):
        check_vectors(answer, answer.ask, what)
        return
    if answer.rights is not None:
        check_form(answer, answer.rights)
        return
    found, ask = said_in(answer), answer.ask
    said_of = ask.right_ids if ask.path == "/generate" else ask.right_text
    right = [said_of(sample) for sample in range(ask.num_samples)]
    if found != right:
        raise Violation("S14", f"{what}: {found!r}, not {right!r}")
    if ask.scores and ask.path == "/generate":
        _check_scores(answer.events()[-1], ask.right_scores(), what)


def _check_scores(said: dict[str, Any], right: list[tuple[int, float]], what: str) -> None:
    scores = [(token, logprob) for logprob, token, _ in said["meta_info"]["output_token_logprobs"]]
    if scores != right:
        raise Violation("S14", f"{what}: the scores {scores}, not {right}")


def _check_flow(answer: Answer, what: str, base_s: float, block_tokens: int) -> None:
    """What is made token by token, or block by block, comes so: each takes a batch, however long one has to wait."""
    is_right = answer.is_whole and answer.error is None  # else some of it has not come at all
    if not is_right or not answer.ask.is_streamed or answer.first_s is None or answer.rights is not None:
        return  # how many tokens an answer in a form has is the model's to say
    made_s = (len(answer.ask.right_ids()) // block_tokens - 1) * base_s
    flowed_s = (answer.ended_s or 0.0) - answer.first_s - answer.longest_gap_s
    if made_s > FLOW_S and flowed_s < (made_s - base_s) / 2:
        raise Violation("L1", f"{what}: of tokens of {made_s:.1f} s all but {flowed_s:.1f} s have come at once")


def _check_time(answer: Answer, what: str) -> None:
    ask, ended = answer.ask, answer.ended_s or 0.0
    first = ended if answer.first_s is None else answer.first_s
    if ask.is_streamed and first > ask.timeout_s + GRACE_S:
        raise Violation("L1", f"{what}: {first:.1f} s until the first byte of {ask.timeout_s:g} s")
    if answer.longest_gap_s > STALL_S + GRACE_S:
        raise Violation("L1", f"{what}: a gap of {answer.longest_gap_s:.1f} s")
    if not ask.is_streamed and ended > ask.timeout_s + STALL_S + GRACE_S:
        raise Violation("L1", f"{what}: {ended:.1f} s of {ask.timeout_s:g} s")
