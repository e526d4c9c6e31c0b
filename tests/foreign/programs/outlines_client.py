"""outlines: what it asks of vLLM and of SGLang, in the words of each: types, patterns, choices and grammars."""

import re
from typing import Literal

import openai
import outlines
from _shared import BASE, KEY, MODEL, QUESTIONS, alone, same, shown
from outlines.types import CFG, Regex
from pydantic import BaseModel

# Begun with `?start`, as its documentation writes grammars.
SUM = """
?start: NUMBER operator NUMBER
?operator: " + " | " - "
NUMBER: /[0-9]{1,3}/
"""


class Worked(BaseModel):
    steps: str
    answer: int


client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0)
models = [outlines.from_openai(client, MODEL), outlines.from_sglang(client, MODEL), outlines.from_vllm(client, MODEL)]
usual = {"temperature": 0, "max_tokens": 96}
for model in models:
    for question in QUESTIONS:
        expected = alone(question)
        same(model(question, **usual), expected)
        same("".join(model.stream(question, **usual)), expected)
    assert Worked.model_validate_json(model("Calculate 3 + 4.", Worked, **usual)).answer == 7
for model in models[1:]:
    assert model("Calculate 3 + 4.", Literal["yes", "no"], **usual) in ("yes", "no")
    assert re.fullmatch("[0-9]{2}", model("Calculate 3 + 4.", Regex("[0-9]{2}"), **usual))
    assert re.fullmatch("[0-9]{1,3} [-+] [0-9]{1,3}", model("Calculate 3 + 4.", CFG(SUM), **usual))
shown(
    f"by 3 models {3 * 2 * len(QUESTIONS)} answers, whole and streamed",
    "3 objects of a type",
    "in the words of vLLM and SGLang a choice, a pattern and a grammar",
)
