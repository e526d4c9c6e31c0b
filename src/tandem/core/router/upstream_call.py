"""One half of one attempt: what its connection shows, in the words of the router.

Head, pieces and end come in from whoever has the connection; out go the events for `Router.step`. What is in a body is
not looked at here: only its last word, if that was an error.

    prefill               2xx head: `HalfAnswered`   end: `HalfEnded`; `HalfFailed` where its server ended
    decode, a document    2xx head: `HalfAnswered`   end: `DecodeSpoke`, `HalfEnded`
    decode, a stream      first piece: `DecodeSpoke` end: `HalfEnded`; `HalfFailed` where no piece came for too long,
                          or where one that can be resumed says that it cannot go on
    any other status      end of the body: `HalfRejected`
    no connection, or one that broke: `HalfFailed`

After its last word, or once it was cancelled, a call says nothing.
"""

from dataclasses import dataclass

from tandem.core.router.messages import (
    DecodeSpoke,
    HalfAnswered,
    HalfEnded,
    HalfEvent,
    HalfFailed,
    HalfFailure,
    HalfRejected,
    Side,
)
from tandem.core.values import SECOND, Cause, Nanos, RequestId

Said = tuple[HalfEvent, ...]
NOW = Nanos(0)


@dataclass(slots=True)
class UpstreamCall:
    request: RequestId
    attempt: int
    half: Side
    stall_ns: Nanos  # between two pieces of a stream
    status: int = 0  # 0: no head yet
    is_stream: bool = False  # of decode: its bytes go on to the client as they come
    is_resumable: bool = False  # of a stream: another decode can go on with it
    is_over: bool = False
    _has_spoken: bool = False

    @property
    def is_accepted(self) -> bool:
        return 200 <= self.status < 300

    @property
    def patience_ns(self) -> Nanos | None:
        """How long the next piece may take. None: until the first piece the request's deadline counts."""
        return self.stall_ns if self._has_spoken and not self.is_over else None

    def cancel(self) -> None:
        """Whatever its connection still shows is not of interest."""
        self.is_over = True

    def head(self, status: int, *, is_event_stream: bool, is_resumable: bool = False) -> Said:
        if self.is_over:
            return ()
        self.status = status
        self.is_stream = self.is_accepted and is_event_stream and self.half is Side.DECODE
        self.is_resumable = self.is_stream and is_resumable
        if not self.is_accepted or self.is_stream:
            return ()
        return (HalfAnswered(self.request, self.attempt, self.half),)

    def piece(self) -> Said:
        """Some of the body. Of a stream it must have been put before the client."""
        if self.is_over or not self.is_stream or self._has_spoken:
            return ()
        self._has_spoken = True
        return (DecodeSpoke(self.request, self.attempt, self.is_resumable),)

    def end(self, error: str | None = None, detail: str = "") -> Said:
        """The body is complete. `error`: the code of the error that is its last word, if there is one."""
        if self.is_over:
            return ()
        if self.half is Side.PREFILL and error == Cause.WORKER_LOST:  # and has told decode nothing
            return self.fail(HalfFailure.BROKEN, f"its server ends: {detail}")
        self.is_over = True
        has_error = error is not None and self.half is Side.PREFILL
        ended = HalfEnded(self.request, self.attempt, self.half, has_error)
        if self.half is Side.DECODE and not self.is_stream:
            return (DecodeSpoke(self.request, self.attempt), ended)
        return (ended,)

    def reject(self, *, is_retryable: bool | None) -> Said:
        """The body of another status than 2xx is complete. `is_retryable`: as it says; None: it does not."""
        if self.is_over:
            return ()
        self.is_over = True
        return (HalfRejected(self.request, self.attempt, self.half, self.status, is_retryable),)

    def stall(self) -> Said:
        """No piece has come for `patience_ns`."""
        return self.fail(HalfFailure.STALLED, f"no byte for {self.stall_ns / SECOND:g} s", silent_ns=self.stall_ns)

    def give_up(self, detail: str, *, silent_ns: Nanos, serves_on: bool) -> Said:
        """The last word of a stream that can be resumed: here it cannot go on, elsewhere it may."""
        return self.fail(HalfFailure.GAVE_UP, detail, silent_ns=silent_ns, serves_on=serves_on)

    def fail(self, failure: HalfFailure, detail: str, *, silent_ns: Nanos = NOW, serves_on: bool = False) -> Said:
        """silent_ns: since the last piece; serves_on: as in `HalfFailed`"""
        if self.is_over:
            return ()
        self.is_over = True
        return (HalfFailed(self.request, self.attempt, self.half, failure, detail, silent_ns, serves_on),)
