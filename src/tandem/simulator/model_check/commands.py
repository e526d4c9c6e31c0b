"""What the node of a small replica asks for: work for its worker and its data plane, messages, and answers to clients.

Tokens and ends are checked here, at the moment at which a client would see them.
"""

import msgspec

from tandem.core.commands import (
    CancelPull,
    Command,
    EmitTokens,
    FailRequest,
    FetchPages,
    FinishReason,
    FinishRequest,
    ForgetRequests,
    FreeWindows,
    LaunchBatch,
    LearnPeer,
    LoadPages,
    LookUpPages,
    PublishPages,
    PullPages,
    RenderAgain,
    RevokePages,
    StartRequest,
    StorePages,
    Tell,
    WritePages,
)
from tandem.core.disagg.messages import Message, Offer, Ready
from tandem.core.settings import Role
from tandem.core.values import ZERO_NS
from tandem.simulator.model_check.replica_value import Draft, SmallHalf
from tandem.simulator.oracle import Script, Violation


def dispatch(draft: Draft, command: Command) -> None:
    match command:
        case LaunchBatch(plan):
            draft.work.append(plan)
        case ForgetRequests(requests):
            draft.work.append(requests)
        case EmitTokens() | StartRequest() | FinishRequest() | FailRequest():
            _see(draft, command)
        case RenderAgain(request):
            draft.to_render.append(request)
        case LearnPeer(address):
            if address not in draft.lookups:
                draft.lookups.append(address)
        case Tell(peer, message):
            draft.told.append((peer, _timeless(message)))
        case PublishPages():
            draft.lender.publish(command)
            draft.to_digest.append(command)
        case RevokePages(request, attempt):
            draft.to_digest = [job for job in draft.to_digest if (job.request, job.attempt) != (request, attempt)]
            draft.lender.revoke(request, attempt)
        case FreeWindows(pages):
            draft.executor.memory.free_windows(pages)
        case StorePages() | LoadPages():
            draft.copies.append(command)
        case LookUpPages() | FetchPages() | WritePages():
            draft.asked.append(command)
        case PullPages():
            draft.reader.pull(command)
            draft.reader.go_on()
        case CancelPull():
            draft.reader.cancel(command)


def _timeless(message: Message) -> Message:
    """Durations in a result slot are for a ledger: without them equal situations look equal. So do they without how
    long decode has waited, which grows; each replica here has a clock of its own, which begins with every life.
    """
    if isinstance(message, Ready):
        return msgspec.structs.replace(message, waited_ns=ZERO_NS)
    if not isinstance(message, Offer) or message.result is None:
        return message
    row = msgspec.structs.replace(message.result, queue_ns=ZERO_NS, compute_ns=ZERO_NS, overlapped_ns=ZERO_NS)
    return msgspec.structs.replace(message, result=row)


def _see(draft: Draft, command: EmitTokens | StartRequest | FinishRequest | FailRequest) -> None:
    """The client's view: a start, the right tokens, one end, and nothing after it."""
    requests = command.requests if isinstance(command, EmitTokens) else (command.request,)
    for index, request in enumerate(requests):
        half = draft.halves.get(request)
        if half is None or half.end:
            raise Violation(
                "S12", f"{draft.cast.name}: {type(command).__name__} for request {request}, which has ended"
            )
        if isinstance(command, EmitTokens):
            token = int.from_bytes(command.tokens[4 * index : 4 * index + 4], "little")
            if not half.has_started or token != _script(draft, half).output_token(half.tokens):
                raise Violation("S14", f"{draft.cast.name}: token {half.tokens} of request {request} is {token}")
            draft.halves[request] = msgspec.structs.replace(half, tokens=half.tokens + 1)
        elif isinstance(command, StartRequest):
            if half.has_started:
                raise Violation("S12", f"{draft.cast.name}: a second start of request {request}")
            draft.halves[request] = msgspec.structs.replace(half, has_started=True)
        elif isinstance(command, FinishRequest):
            _check_answer(draft, half, command)
            draft.halves[request] = msgspec.structs.replace(half, end="finished")
        else:
            draft.halves[request] = msgspec.structs.replace(half, end=str(command.cause))


def _script(draft: Draft, half: SmallHalf) -> Script:
    return draft.cast.script(half.request, is_rendered_anew=half.is_rendered_anew)


def _check_answer(draft: Draft, half: SmallHalf, command: FinishRequest) -> None:
    script = _script(draft, half)
    wanted = script.output_length() if draft.cast.settings.role is Role.DECODE else half.tokens
    if half.tokens != wanted or (command.reason is FinishReason.LENGTH and half.tokens > script.max_new_tokens):
        raise Violation("S14", f"{draft.cast.name}: request {half.request} ends after {half.tokens} of {wanted} tokens")
