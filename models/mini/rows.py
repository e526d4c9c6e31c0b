"""Training rows of the bundled model as text: problems, calls of a calculator, JSON on request, and small talk.

A row is a list of pieces, each a text with its weight in the loss.
"""

from __future__ import annotations

import json
import random
import re

import everyday
import problems
from words import BOYS, GIRLS, THINGS, plural

CHAIN = re.compile(r"\d+(?: [-+*/=] \d+)+")
Row = list[tuple[str, float]]
PROMPT_LOSS_WEIGHT = 0.1
"""Weight of question tokens in the loss; answer tokens weigh 1, fixed markup 0."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful math tutor. Show your work and end with the answer after ####.",
    "Solve the problem step by step.",
    "Answer the question. Put the final number after ####.",
)
TOOL_PROMPTS = (
    "Use the calculator.", "You are a helpful assistant. Use the tools.", "Solve the problem with the calculator tool.",
    "You solve word problems. Call the calculator, then say the answer.", "You are a helpful assistant.", "Use tools.",
)  # fmt: skip
WRAPPERS = (
    ("Solve this problem: ", ""),
    ("Please help me with this one. ", ""),
    ("", " Show your work."),
    ("", " Think step by step."),
    ("Question: ", ""),
    ("Hi! ", " Thanks!"),
)
"""Text that users put before and after a question."""

GREETINGS = (
    "Hello!", "Hello", "Hi", "hi", "hello", "hey", "Hi there!", "Hey, how are you?", "Good morning", "Hello, world!",
    "Hello there", "hi!", "Hey!", "Good evening", "How are you?", "Greetings", "hello there!", "good day",
    "Hi, how are you?",
)  # fmt: skip
GREETING_REPLY = "Hello! I am a very small model. Ask me a short arithmetic word problem and I will work it out."
IDENTITY = (
    "Who are you?", "who are you", "What can you do?", "What is your name?", "what are you?", "Can you help me?",
    "Tell me about yourself.", "What are you for?", "help", "Which model are you?", "what can you do", "who made you?",
)  # fmt: skip
IDENTITY_REPLY = "I am Tandem mini, a very small model that works out short arithmetic word problems. Ask me one."
THANKS = (
    "Thanks!",
    "thanks",
    "Thank you.",
    "thank you!",
    "Great, thanks",
    "Bye",
    "Goodbye!",
    "ok thanks",
    "Thank you so much",
)
THANKS_REPLY = "You are welcome. Ask me another problem."
OFF_TOPIC = (
    "Tell me a joke.", "Write a poem about the sea.", "What is the capital of France?", "Say something.", "Test",
    "Tell me a story.", "How does a computer work?", "Translate this to German.", "Explain how a server works.",
    "Write a Python function.", "Once upon a time", "The quick brown fox", "Why?",
    "What do you think about the weather?",
    "Give me three ideas for dinner.", "What is the meaning of life?", "Sing a song.", "Who is the president?",
)  # fmt: skip
OFF_TOPIC_FORMS = (
    "Write a poem about {}.", "Tell me about {}.", "What is a {}?", "Do you like {}?", "Why are {} so nice?",
    "Draw a {}.",
    "Where can I buy {}?", "Tell me a story about a {}.", "What color is the {}?", "Who is {}?", "How do I make a {}?",
    "Explain {}.", "Describe a {} in one sentence.", "Write an essay about {}", "What do you know about {}?",
    "Translate {} to French.", "Give me ideas for {}.", "Is a {} better than a {}?", "I like {}.",
    "Write code for a {}.",
)  # fmt: skip
OFF_TOPIC_REPLY = "I am a very small model. Ask me a short arithmetic word problem and I will work it out."

JSON_WITH_STEPS = (
    "Answer as JSON.", "Answer in JSON.", "Reply with JSON only.", "Give the answer as JSON.", "Return JSON.",
    "as json please", "Respond in JSON.", "Output JSON.", "JSON, please.", "Answer with a JSON object.",
    'Answer as JSON with the keys "steps" and "answer".', "Write the answer as JSON.",
)  # fmt: skip
JSON_ANSWER_ONLY = (
    'Answer as JSON with the key "answer".', 'Reply only with {"answer": number}.', 'Return JSON like {"answer": 0}.',
    'Answer as {"answer": N}.', "Only the answer, as JSON.", 'Give JSON with one key, "answer".',
)  # fmt: skip

TOOL_TEXTS = (
    "Evaluate an arithmetic expression.", "Calculates the value of an expression.", "A calculator.",
    "Compute a result.",
    "Evaluates a mathematical expression and returns the result.", "Works out an arithmetic expression, such as 2 + 3.",
    "Use this for arithmetic.", "Do the math.", "Return the value of `expression`.", "Perform a calculation.",
)  # fmt: skip
ARGUMENT_TEXTS = (
    "The expression to evaluate", "An arithmetic expression", "For example 2 * (3 + 4)", "Expression with + - * /",
    "what to compute", "A formula as text.",
)  # fmt: skip


def calculator(rng: random.Random) -> dict[str, object]:
    """The calculator as programs describe it: with more or fewer words, and with what their libraries add."""
    argument: dict[str, object] = {"type": "string"}
    if rng.random() < 0.5:
        argument["description"] = rng.choice(ARGUMENT_TEXTS)
    if rng.random() < 0.3:
        argument = {"title": "Expression", **argument} if rng.random() < 0.5 else {**argument, "title": "Expression"}
    schema: list[tuple[str, object]] = [("type", "object"), ("properties", {"expression": argument})]
    if rng.random() < 0.8:
        schema.append(("required", ["expression"]))
    if rng.random() < 0.3:
        schema.append(("additionalProperties", False))
    if rng.random() < 0.2:
        schema.append(("title", rng.choice(("calculator_args", "Calculator", "calculator"))))
    if rng.random() < 0.3:
        rng.shuffle(schema)
    function: list[tuple[str, object]] = [("name", "calculator")]
    if rng.random() < 0.9:
        function.append(("description", rng.choice(TOOL_TEXTS)))
    function.append(("parameters", dict(schema)))
    if rng.random() < 0.3:
        function.append(("strict", rng.random() < 0.7))
    return {"type": "function", "function": dict(function)}


class RowMaker:
    """Draws rows; the same seed always gives the same rows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"format-{seed}")
        self._templates = problems.train_problems(seed)
        self._everyday = everyday.train_problems(seed)

    def problem(self) -> problems.Problem:
        """A problem of a template, or an everyday one; these are shorter, so there are more of them."""
        return next(self._everyday if self.random.random() < 0.58 else self._templates)

    def words(self, digits: bool) -> str:
        """A sentence of made-up words, names, objects and (if ``digits``) numbers."""
        words = []
        for _ in range(self.random.randint(2, 12)):
            kind = self.random.random()
            if kind < 0.2:
                words.append(self.random.choice(problems.NAMES + problems.ITEMS))
            elif kind < 0.3 and digits:
                words.append(str(self.random.randint(0, 2000)))
            else:
                letters = self.random.choices("abcdefghijklmnopqrstuvwxyzeeaaoit", k=self.random.randint(1, 9))
                words.append("".join(letters))
        words[0] = words[0].capitalize()
        return " ".join(words) + self.random.choice(".?!,:")

    def small_talk(self) -> tuple[str, str]:
        """What is no problem, and the sentence that answers it."""
        kind = self.random.random()
        if kind < 0.3:
            return self.random.choice(GREETINGS), GREETING_REPLY
        if kind < 0.5:
            return self.random.choice(IDENTITY), IDENTITY_REPLY
        if kind < 0.58:
            return self.random.choice(THANKS), THANKS_REPLY
        if kind < 0.7:
            return self.random.choice(OFF_TOPIC), OFF_TOPIC_REPLY
        if kind < 0.85:
            return self.words(digits=False), OFF_TOPIC_REPLY
        text = self.random.choice(OFF_TOPIC_FORMS)
        while "{}" in text:
            one = self.random.choice(THINGS)
            filled = (
                one
                if text[: text.index("{}")].endswith(("a ", "the "))
                else self.random.choice((plural(one), *GIRLS, *BOYS))
            )
            text = text.replace("{}", filled, 1)
        return text, OFF_TOPIC_REPLY

    def json_request(self) -> tuple[str, str]:
        """A problem that asks for JSON, and the object that answers it."""
        problem = self.problem()
        lines = problem.worked.split("\n")[:-1]
        chains = [_chain_of(line) for line in lines]
        is_short = len(chains) == 1 and chains[0].count("=") == 1
        if is_short and self.random.random() < 0.75:
            instruction, reply = self.random.choice(JSON_ANSWER_ONLY), {"answer": int(problem.answer)}
        else:
            instruction = self.random.choice(JSON_WITH_STEPS)
            reply = {"steps": "; ".join(chains), "answer": int(problem.answer)}
        return f"{problem.question} {instruction}", json.dumps(reply)

    def turn(self) -> Row:
        """One question without tools and its answer."""
        kind = self.random.random()
        before = after = ""
        weight = PROMPT_LOSS_WEIGHT
        if kind < 0.05:
            (question, reply), weight = self.small_talk(), 0.0
        elif kind < 0.12:
            question, reply = self.json_request()
        else:
            problem = self.problem()
            question, reply = problem.question, problem.worked
            if self.random.random() < 0.1:
                before, after = self.random.choice(WRAPPERS)
        return [
            (f"<|im_start|>user\n{before}", 0.0),
            (question, weight),
            (f"{after}<|im_end|>\n<|im_start|>assistant\n", 0.0),
            (f"{reply}<|im_end|>", 1.0),
        ]

    def tool_turn(self) -> Row:
        """One question where there is a calculator: its call, its result and the answer."""
        if self.random.random() < 0.06:
            question, reply = self.small_talk()
            return [
                (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", 0.0),
                (f"{reply}<|im_end|>", 1.0),
            ]
        problem = self.problem()
        call = {"name": "calculator", "arguments": {"expression": problem.expression.replace("//", "/")}}
        kind = self.random.random()
        result = (
            problem.answer if kind < 0.7 else f"{problem.answer}.0" if kind < 0.9 else f'{{"result": {problem.answer}}}'
        )
        return [
            ("<|im_start|>user\n", 0.0),
            (problem.question, PROMPT_LOSS_WEIGHT),
            ("<|im_end|>\n<|im_start|>assistant\n", 0.0),
            (f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>", 1.0),
            (
                f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
                0.0,
            ),
            (f"#### {problem.answer}<|im_end|>", 1.0),
        ]

    def tools(self) -> Row:
        """The system message of a chat with the calculator."""
        prompt = f"{self.random.choice(TOOL_PROMPTS + SYSTEM_PROMPTS)}\n" if self.random.random() < 0.6 else ""
        told = json.dumps(calculator(self.random), ensure_ascii=False)
        return [(f"<|im_start|>system\n{prompt}<tools>\n{told}\n</tools><|im_end|>\n", 0.0)]

    def plain(self, shots: int) -> Row:
        """``shots`` problems in "Question: ... Answer: ..." form, for servers' raw completions."""
        row: Row = []
        separator = self.random.choice(("\n", " "))
        for shot in range(shots):
            problem = self.problem()
            row += [
                ("\n\n" if shot else "", 0.0),
                ("Question: ", 0.0),
                (problem.question, PROMPT_LOSS_WEIGHT),
                (f"\nAnswer:{'' if separator == ' ' else separator}", 0.0),
                (f"{' ' if separator == ' ' else ''}{problem.worked}", 1.0),
            ]
        return [*row, ("<|im_end|>", 1.0)]

    def any_row(self) -> Row:
        """One row of any kind, for the tokenizer."""
        kind = self.random.random()
        if kind < 0.1:
            return self.plain(1)
        return [*self.tools(), *self.tool_turn()] if kind < 0.22 else self.turn()


def _chain_of(line: str) -> str:
    """The sums of a worked line, without the words around them."""
    found = CHAIN.search(line)
    assert found is not None, line
    return found.group()
