"""A request of the engine: what every worker keeps of one, and what sampling needs."""

from array import array
from dataclasses import dataclass

from tandem import batch_tables
from tandem.core.values import RequestId
from tandem.engine.sampler import Draw, History
from tandem.grammar import Matcher
from tandem.sampling import Payload, SamplingParams, VectorParams


@dataclass(slots=True, kw_only=True)
class EngineSequence(batch_tables.Sequence):
    params: SamplingParams
    history: History | None  # token counts, only where a penalty needs them
    matcher: Matcher | None = None  # only with a grammar, and only where tokens are sampled
    vector: VectorParams | None = None  # of one that ends with its prompt
    num_said: int = 0  # the last tokens of the prompt, that are output: said elsewhere before

    @classmethod
    def of(cls, payload: Payload, *, page_size: int, matcher: Matcher | None = None) -> "EngineSequence":
        tokens = array("i")
        tokens.frombytes(payload.tokens)
        assert len(tokens) >= 1, "a prompt has at least one token"
        sequence = cls(
            request=RequestId(payload.request),
            params=payload.sampling,
            prompt_len=len(tokens),
            page_size=page_size,
            tokens=tokens,
            history=None,
            prompt_hash=payload.last_hash,
            matcher=matcher,
            vector=payload.vector,
            num_said=payload.num_said,
        )
        sequence._read_again()
        return sequence

    @property
    def output_from(self) -> int:
        """Where the answer begins, which may be before the end of what is computed as its prompt."""
        return self.prompt_len - self.num_said

    def _read_again(self) -> None:
        """What sampling keeps of the tokens."""
        said = self.tokens[self.output_from :]
        self.history = History.of(self.params, self.tokens[: self.output_from])
        if self.history is not None:
            for token in said:
                self.history.add(token)
        if self.matcher is not None:
            self.matcher.restart(said)

    def scored(self, start: int, stop: int) -> range:
        """Positions of [start, stop) whose logits say something of a prompt token that a client wants to know."""
        first = self.params.prompt_logprobs_from
        return range(0) if first is None else range(max(start, first), min(stop, self.prompt_len - 1))

    def draw(self) -> Draw:
        """What sampling the next token needs."""
        return Draw(
            params=self.params,
            position=len(self.tokens),
            num_outputs=self.num_said + self.num_outputs,
            history=self.history,
            allowed=None if self.matcher is None else self.matcher.allowed(),
        )

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.history is not None:
            self.history.add(token)
        if self.matcher is not None:
            self.matcher.accept(token)

    def cut(self, stop: int) -> None:
        is_cut = stop < len(self.tokens)
        batch_tables.Sequence.cut(self, stop)
        if is_cut:
            self._read_again()
