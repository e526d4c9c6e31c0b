"""instructor in its modes TOOLS, JSON_SCHEMA and JSON."""

from typing import Literal

import instructor
from _shared import BASE, KEY, MODEL, shown
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or a model that knows no end adds fields for ever

    a: int = Field(ge=0, le=99)
    operator: Literal["+", "-", "*"]
    b: int = Field(ge=0, le=99)


class Answer(BaseModel):
    """What the bundled model was taught to write when it is asked for JSON."""

    steps: str
    answer: int


QUESTION = (
    "Tom has 3 apples and buys 4 more. How many apples does Tom have? "
    'Answer as JSON with the keys "steps" and "answer".'
)


def ask(mode: instructor.Mode, wanted: type[BaseModel], question: str) -> BaseModel:
    client = instructor.from_openai(OpenAI(base_url=f"{BASE}/v1", api_key=KEY), mode=mode)
    return client.chat.completions.create(
        model=MODEL,
        response_model=wanted,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=160,
        max_retries=0,
    )


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    assert isinstance(ask(mode, Sum, "Calculate 3 + 4."), Sum), mode
# JSON bounds the answer to some object (`json_object`): the fields are the model's to fill in.
found = ask(instructor.Mode.JSON, Answer, QUESTION)
assert isinstance(found, Answer)
assert found.answer == 7, found
shown("TOOLS and JSON_SCHEMA give a type that the model does not know, JSON the one that it does")
