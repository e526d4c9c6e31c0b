"""instructor in its modes TOOLS, JSON and JSON_SCHEMA."""

from typing import Literal

import instructor
from _shared import BASE, KEY, MODEL, shown
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or a model that knows no end adds fields for ever

    a: int = Field(ge=0, le=99)
    operator: Literal["+", "-", "*"]
    b: int = Field(ge=0, le=99)


failed: dict[str, str] = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(base_url=f"{BASE}/v1", api_key=KEY), mode=mode)
    try:
        found = client.chat.completions.create(
            model=MODEL,
            response_model=Sum,
            messages=[{"role": "user", "content": "Calculate 3 + 4."}],
            temperature=0,
            max_tokens=160,
            max_retries=0,
        )
        assert isinstance(found, Sum)
    except (IncompleteOutputException, InstructorRetryException) as error:
        failed[mode.name] = str(error).splitlines()[0][:200]
# JSON asks for any object (`json_object`), and what is in it is the model's: a larger model would fill in the fields.
assert set(failed) <= {"JSON"}, failed
shown(
    "TOOLS and JSON_SCHEMA give the type",
    "with JSON, which asks for any object, this model does not come to its end" if failed else "so does JSON",
)
