"""guidance: prompts that are written and generated in turn, its own grammars in the words of vLLM and of SGLang."""

import re

import guidance
from _shared import BASE, CALCULATOR, KEY, MODEL, QUESTIONS, alone, same, shown
from guidance import assistant, gen, json, select, user
from guidance.models import OpenAI
from guidance.models.experimental import SglangModel, VLLMModel
from pydantic import TypeAdapter

MODELS = (OpenAI, VLLMModel, SglangModel)


@guidance
def asked(model, question):
    with user():
        model += question
    return model


def made(kind):
    greedy = {} if kind is OpenAI else {"sampling_params": {"top_k": 1}}  # a grammar's temperature is not sent
    return kind(MODEL, base_url=f"{BASE}/v1", api_key=KEY, echo=False, **greedy)


for kind in MODELS:
    for question in QUESTIONS:
        model = made(kind) + asked(question)
        with assistant():
            model += gen("said", temperature=0, max_tokens=96)
        same(model["said"], alone(question))
    model = made(kind) + asked("Calculate 3 + 4.")
    with assistant():
        model += json("form", schema=CALCULATOR, temperature=0)
    assert set(TypeAdapter(dict).validate_json(model["form"])) == {"a", "operator", "b"}, model["form"]
for kind in MODELS[1:]:
    model = made(kind) + asked("Calculate 3 + 4.")
    with assistant():
        model += "The answer is " + gen("number", regex="[0-9]{1,3}", temperature=0) + "."
    assert re.fullmatch("[0-9]{1,3}", model["number"]), model["number"]
    model += asked("Is that right?")
    with assistant():
        model += select(["yes", "no"], name="right")
    assert model["right"] in ("yes", "no"), model["right"]
shown(
    f"by {len(MODELS)} models {len(MODELS) * len(QUESTIONS)} answers, 3 objects by a schema",
    "in the words of vLLM and SGLang a text with a number in it, and a choice in the turn after it",
)
