"""Requests that end with their prompts, to the unified server of some seeds, which makes nothing but vectors."""

from array import array
from base64 import b64decode
from dataclasses import dataclass, fields
from itertools import chain
from math import isclose
from random import Random
from typing import Any  # JSON documents

from tandem.simulator.oracle import Violation
from tandem.simulator.whole.clients import Answer, ClientRequest

PATH = "/v1/embeddings"


# Of a number: what sums of parts, which several workers have, may differ by from one sum. A prompt that is another one
# makes another vector altogether; the numbers of `engine.py` are whole ones of 16 bits, so no two of them are so near.
NEAR = 1e-5


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
    right = [ask.answers.vector(prompt) for prompt in ask.inputs]
    found = [read(one["embedding"]) for one in said["data"]]
    if not are_near(found, right) or [one["index"] for one in said["data"]] != list(range(len(right))):
        raise Violation("S14", f"{what}: {found}, not {right}")
    num_tokens = sum(map(len, ask.inputs))
    if said["usage"]["total_tokens"] != num_tokens:
        raise Violation("S14", f"{what}: {said['usage']} of {num_tokens} tokens")


def are_near(found: list[list[float]], right: list[list[float]]) -> bool:
    if [len(vector) for vector in found] != [len(vector) for vector in right]:
        return False
    pairs = zip(chain.from_iterable(found), chain.from_iterable(right), strict=True)
    return all(isclose(one, other, rel_tol=NEAR, abs_tol=NEAR) for one, other in pairs)


def read(embedding: str | list[float]) -> list[float]:
    if not isinstance(embedding, str):
        return embedding
    values = array("f")
    values.frombytes(b64decode(embedding))
    return values.tolist()
