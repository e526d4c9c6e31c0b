"""SGLang's frontend language over /generate: programs, batches, forks, streams, choices and forms of an answer."""

import json
import re
from typing import Any

import sglang as sgl
from _shared import BASE, CALCULATOR, QUESTIONS, UNIFIED, alone, same, shown
from sglang.lang.choices import token_length_normalized

CHOICES = ("Calculate 3 + 4.", "Calculate 5 + 7.", "Hello!")
TOLERANCE = 1e-3
ANSWER = {"max_tokens": 96, "temperature": 0, "stop": "<|im_end|>"}


def asked(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@sgl.function
def solve(s: Any, question: str) -> None:
    s += asked(question) + sgl.gen("answer", **ANSWER)


@sgl.function
def solve_twice(s: Any, question: str) -> None:
    s += asked(question)
    forks = s.fork(2)
    forks += sgl.gen("answer", **ANSWER)
    for fork in forks:
        s += fork["answer"]


@sgl.function
def choose(s: Any, question: str) -> None:
    s += asked(question) + "#### "
    s += sgl.gen("choice", choices=["12", "7", "Hello there"], choices_method=token_length_normalized)


@sgl.function
def shape(s: Any) -> None:
    s += asked("Calculate 3 + 4.") + sgl.gen("code", max_tokens=20, regex=r"[0-9]{3}-[a-c]{2}", temperature=0)
    s += asked("Calculate 3 + 4.") + sgl.gen("sum", max_tokens=96, json_schema=json.dumps(CALCULATOR), temperature=0)
    s += asked("Calculate 3 + 4.") + sgl.gen_int("number", max_tokens=8, temperature=0)


@sgl.function
def scored(s: Any, question: str) -> None:
    s += asked(question)
    s += sgl.gen("answer", **ANSWER, return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)


sgl.set_default_backend(sgl.RuntimeEndpoint(BASE))
expected = [alone(question) for question in QUESTIONS]
for state, answer in zip(solve.run_batch([{"question": it} for it in QUESTIONS], num_threads=3), expected, strict=True):
    same(state["answer"], answer)
for question, answer in zip(QUESTIONS, expected, strict=True):
    same("".join(solve.run(question=question, stream=True).text_iter("answer")), answer)
    same(solve_twice.run(question=question).text(), asked(question) + answer + answer)
    told = scored.run(question=question).get_meta_info("answer")
    texts = [text for _, _, text in told["output_token_logprobs"]]
    assert "".join(texts).startswith(answer), (texts, answer)
    assert [len(tops) for tops in told["output_top_logprobs"]] == [2] * len(texts)
for question in CHOICES:
    both = [choose.run(question=question, backend=sgl.RuntimeEndpoint(url)) for url in (BASE, UNIFIED)]
    same(*(state["choice"] for state in both))
    ours, theirs = (state.get_meta_info("choice")["normalized_prompt_logprobs"] for state in both)
    assert all(abs(a - b) < TOLERANCE for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
forms = shape.run()
assert re.fullmatch(r"[0-9]{3}-[a-c]{2}", forms["code"]), forms["code"]
assert set(json.loads(forms["sum"])) == set(CALCULATOR["required"]), forms["sum"]
int(forms["number"])
shown(
    f"{5 * len(QUESTIONS)} answers in batches, streams, forks and with log-probabilities equal to one engine's",
    f"{len(CHOICES)} choices with its log-probabilities within {TOLERANCE:g}, 3 forms kept",
)
