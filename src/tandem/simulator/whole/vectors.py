"""Requests that end with their prompts, to the unified server of some seeds, which makes nothing but vectors."""

from array import array
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any  # JSON documents

from tandem.simulator.model import MASK, kv_content
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.clients import Answer, ClientRequest
from tandem.simulator.whole.engine import vector_of

PATH = "/v1/embeddings"


def right_vector(prompt: Sequence[int]) -> list[float]:
    """What every engine, of however many workers, has to answer."""
    kv_sum = 0
    for position, token in enumerate(prompt):
        kv_sum = (kv_sum + kv_content(sum_before=kv_sum, token=token, position=position)) & MASK
    return vector_of(kv_sum)


@dataclass(frozen=True, slots=True)
class VectorAsk(ClientRequest):
    inputs: tuple[tuple[int, ...], ...] = ()
    is_base64: bool = False

    @classmethod
    def of(cls, ask: ClientRequest, random: Random) -> "VectorAsk":
        same = {field.name: getattr(ask, field.name) for field in fields(ClientRequest)}
        same |= {"path": PATH, "text": "", "is_streamed": False, "scores": 0, "num_samples": 1}
        inputs = [ask.prompt[: random.randint(1, len(ask.prompt))] for _ in range(random.choice((1, 1, 3)))]
        return cls(**same, inputs=(ask.prompt, *inputs[1:]), is_base64=random.random() < 0.5)

    def body(self) -> dict[str, Any]:
        form = "base64" if self.is_base64 else "float"
        return {"input": self.inputs, "encoding_format": form, "rid": self.rid}


def check_vectors(answer: Answer, ask: VectorAsk, what: str) -> None:
    """Raises Violation."""
    (said,) = answer.events()
    right = [right_vector(prompt) for prompt in ask.inputs]
    found = [read(one["embedding"]) for one in said["data"]]
    if found != right or [one["index"] for one in said["data"]] != list(range(len(right))):
        raise Violation("S14", f"{what}: {found}, not {right}")
    num_tokens = sum(map(len, ask.inputs))
    if said["usage"]["total_tokens"] != num_tokens:
        raise Violation("S14", f"{what}: {said['usage']} of {num_tokens} tokens")


def read(embedding: str | list[float]) -> list[float]:
    if not isinstance(embedding, str):
        return embedding
    values = array("f")
    values.frombytes(b64decode(embedding))
    return values.tolist()
