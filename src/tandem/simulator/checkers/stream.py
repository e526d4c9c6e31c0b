"""What clients get: one end, the right tokens, each of them once."""

from collections import Counter, defaultdict

from tandem.core.commands import EmitTokens, FinishReason, FinishRequest, StartRequest
from tandem.core.disagg.sides import PrefillSide
from tandem.core.settings import Role
from tandem.core.values import Incarnation, RequestId
from tandem.simulator.actors.clients import Half
from tandem.simulator.actors.replica import Life
from tandem.simulator.checkers.base import End, where
from tandem.simulator.model import EOS_TOKEN
from tandem.simulator.oracle import Violation


class OneEnd:
    """Exactly one terminal event, and nothing after it."""

    id = "S12"

    def emitted(self, life: Life, command: EmitTokens) -> None:
        for request in command.requests:
            half = life.halves.get(request)
            if half is None or half.terminal is not None:
                raise Violation(self.id, f"{where(life, request)}: a token after the end")

    def ended(self, life: Life, command: End) -> None:
        half = life.halves.get(command.request)
        if half is None or half.terminal is not None:
            raise Violation(
                self.id, f"{where(life, command.request)}: a second terminal event {type(command).__name__}"
            )
        half.terminal = command


class Tokens:
    """The tokens are those of the oracle, and the answer ends where the oracle's does."""

    id = "S14"

    def began(self, life: Life, command: StartRequest) -> None:
        """What is told of the prompt is made of what stands before each token, once, and by decode only."""
        half = life.halves[command.request]
        told, right = b"".join(command.prompt_extras), half.script.prompt_extras()
        if told != (b"" if half.role is Role.PREFILL else right):
            raise Violation(
                self.id, f"{where(life, half.request)}: {len(told)} bytes about its prompt, of {len(right)} right ones"
            )

    def emitted(self, life: Life, command: EmitTokens) -> None:
        for index, request in enumerate(command.requests):
            half = life.halves[request]
            token = int.from_bytes(command.tokens[4 * index : 4 * index + 4], "little")
            script = half.script
            if half.tokens >= script.output_length():
                raise Violation(self.id, f"{where(life, request)}: token {half.tokens} after the last one")
            if token != script.output_token(half.tokens):
                right = script.output_token(half.tokens)
                raise Violation(self.id, f"{where(life, request)}: token {half.tokens} is {token}, must be {right}")
            half.tokens += 1

    def ended(self, life: Life, command: End) -> None:
        half = life.halves[command.request]
        if not isinstance(command, FinishRequest):
            return
        if half.role is Role.PREFILL:
            if half.tokens > life.settings.block_tokens:
                raise Violation(self.id, f"{where(life, half.request)}: a prefill gave {half.tokens} tokens")
        elif half.script.wants_vector or command.reason is FinishReason.PROMPT:
            self._check_vector(life, half, command)
        elif command.reason is FinishReason.LENGTH:
            if half.tokens != half.script.max_new_tokens:
                raise Violation(self.id, f"{where(life, half.request)} ends after {half.tokens} tokens for length")
        elif not half.stop_sent and half.script.output_token(half.tokens - 1) != EOS_TOKEN:
            raise Violation(self.id, f"{where(life, half.request)} ends after {half.tokens} tokens for no reason")

    def _check_vector(self, life: Life, half: Half, command: FinishRequest) -> None:
        """Who wants one ends with it, and nobody else, and it is made of the whole prompt."""
        if not half.script.wants_vector or command.reason is not FinishReason.PROMPT or half.tokens:
            raise Violation(self.id, f"{where(life, half.request)} ends by {command.reason} after {half.tokens} tokens")
        if command.vector != half.script.vector():
            raise Violation(self.id, f"{where(life, half.request)}: the vector is not that of its prompt")


class StreamsInOrder:
    """No token is skipped or told twice: the node's own count is that of what left, and the start was told once."""

    id = "S15"

    def __init__(self) -> None:
        self.started: defaultdict[Incarnation, set[RequestId]] = defaultdict(set)

    def began(self, life: Life, command: StartRequest) -> None:
        started = self.started[life.incarnation]
        if command.request in started:
            raise Violation(self.id, f"{where(life, command.request)} starts to stream a second time")
        started.add(command.request)

    def emitted(self, life: Life, command: EmitTokens) -> None:
        requests, started = set(command.requests), self.started[life.incarnation]
        if len(requests) < len(command.requests):
            most = max(Counter(command.requests).values())
            if most > life.settings.block_tokens:
                raise Violation(self.id, f"{where(life)}: {most} tokens of one request in one step: {command.requests}")
        for request in command.requests:
            if request not in started:
                raise Violation(self.id, f"{where(life, request)}: a token before the start")

    def settled(self, life: Life) -> None:
        """At the end of a step with tokens: whoever decodes on has given as many as its node believes."""
        requests, halves = life.node.state.requests, life.halves
        for request in life.node.state.micro_batches.members:
            if requests[request].generated != halves[request].tokens:
                made, sent = requests[request].generated, halves[request].tokens
                raise Violation(self.id, f"{where(life, request)} has made {made} tokens, and {sent} have left")

    def recount(self, life: Life) -> None:
        """A token that was made and never left is seen here, when nothing of its request follows."""
        for progress in life.node.state.requests.values():
            half = life.halves.get(progress.id)
            if half is not None and not isinstance(progress.side, PrefillSide) and progress.generated != half.tokens:
                raise Violation(
                    self.id,
                    f"{where(life, progress.id)} has made {progress.generated} tokens, and {half.tokens} have left",
                )
