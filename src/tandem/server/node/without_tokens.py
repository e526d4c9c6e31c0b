"""What a node is told, decides and knows, without a token: ids, scores and vectors become zeros of the same length.

So do the secrets of grants, with which whoever reads a record might read pages.

The core never looks at them, so a replay of what is masked decides the same.
"""

from msgspec import structs

from tandem.core.batch import BatchPlan, Join, Row
from tandem.core.commands import Command, EmitTokens, FinishRequest, LaunchBatch, PullPages, StartRequest, Tell
from tandem.core.disagg.messages import Message, Offer, ResultSlot
from tandem.core.disagg.sides import AnySide, DecodeSide, PrefillSide
from tandem.core.events import BatchReturned, Event, PagesDigested, PeerSaid
from tandem.core.scheduler.state import NodeState
from tandem.core.values import RequestId


def event_without_tokens(event: Event) -> Event:
    match event:
        case BatchReturned(outcome):
            return BatchReturned(
                structs.replace(
                    outcome,
                    tokens=bytes(len(outcome.tokens)),
                    extras=_zeroed(outcome.extras),
                    prompt_extras=_zeroed(outcome.prompt_extras),
                    vectors=_zeroed(outcome.vectors),
                )
            )
        case PeerSaid():
            return structs.replace(event, message=_masked_message(event.message))
        case PagesDigested():
            return structs.replace(event, secret=bytes(len(event.secret)))
        case _:
            return event


def command_without_tokens(command: Command) -> Command:
    match command:
        case EmitTokens():
            return structs.replace(command, tokens=bytes(len(command.tokens)), extras=_zeroed(command.extras))
        case StartRequest() if command.prompt_extras:
            return structs.replace(command, prompt_extras=_masked_all(command.prompt_extras))
        case FinishRequest() if command.vector:
            return structs.replace(command, vector=bytes(len(command.vector)))
        case LaunchBatch(plan) if plan.join or any(row.token for row in plan.rows):
            return LaunchBatch(_without_first_tokens(plan))
        case Tell():
            return structs.replace(command, message=_masked_message(command.message))
        case PullPages():
            return structs.replace(command, secrets=_masked_all(command.secrets))
        case _:
            return command


def snapshot_without_tokens(snapshot: bytes) -> bytes:
    """First tokens that are handed over, or that no plan has told the workers."""
    state = NodeState.decode(snapshot)
    for progress in state.requests.values():
        progress.untold_token = bytes(len(progress.untold_token))
        progress.prompt_extras = [bytes(len(extra)) for extra in progress.prompt_extras]
        _mask_side(progress.side)
    for micro_batch in state.micro_batches.each:
        micro_batch.joins = {request: _masked_join(join) for request, join in micro_batch.joins.items()}
    for batch in state.inflight:
        batch.rows = tuple(map(_masked_row, batch.rows))
    return state.encode()


def _mask_side(side: AnySide) -> None:
    if isinstance(side, PrefillSide):
        side.result = None if side.result is None else _masked(side.result)
        if side.reader is not None:
            for one in side.reader.digested_shards.values():
                one.secret = bytes(len(one.secret))
    if isinstance(side, DecodeSide) and side.arrival is not None and side.arrival.result is not None:
        side.arrival.result = _masked(side.arrival.result)


def _zeroed(extras: tuple[tuple[RequestId, bytes], ...]) -> tuple[tuple[RequestId, bytes], ...]:
    return tuple((key, bytes(len(extra))) for key, extra in extras)


def _without_first_tokens(plan: BatchPlan) -> BatchPlan:
    """A first token that another node sampled comes with the join, or with the row after a retraction."""
    return structs.replace(
        plan, rows=tuple(map(_masked_row, plan.rows)), join=tuple(_masked_join(join) for join in plan.join)
    )


def _masked_row(row: Row) -> Row:
    return structs.replace(row, token=bytes(len(row.token))) if row.token else row


def _masked_join(join: Join) -> Join:
    return structs.replace(join, token=bytes(len(join.token)))


def _masked_message(message: Message) -> Message:
    if not isinstance(message, Offer):
        return message
    result = None if message.result is None else _masked(message.result)
    return structs.replace(message, result=result, secrets=_masked_all(message.secrets))


def _masked_all(texts: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(bytes(len(text)) for text in texts)


def _masked(result: ResultSlot) -> ResultSlot:
    token, extra = bytes(len(result.token)), bytes(len(result.extra))
    return structs.replace(result, token=token, extra=extra, prompt_extras=_masked_all(result.prompt_extras))
