"""litellm: completions, streams and a forced call of a tool."""

import json

import litellm
from _shared import BASE, CALCULATOR, KEY, MODEL, QUESTIONS, alone, same, shown

WHERE = {"model": f"openai/{MODEL}", "api_base": f"{BASE}/v1", "api_key": KEY, "temperature": 0, "max_tokens": 96}

for question in QUESTIONS:
    messages = [{"role": "user", "content": question}]
    expected = alone(question)
    same(litellm.completion(messages=messages, **WHERE).choices[0].message.content, expected)
    pieces = litellm.completion(messages=messages, stream=True, **WHERE)
    same("".join(piece.choices[0].delta.content or "" for piece in pieces), expected)

tool = {"type": "function", "function": {"name": "calculator", "parameters": CALCULATOR}}
force = {"type": "function", "function": {"name": "calculator"}}
reply = litellm.completion(
    messages=[{"role": "user", "content": "Calculate 3 + 4."}], tools=[tool], tool_choice=force, **WHERE
)
(call,) = reply.choices[0].message.tool_calls
assert set(json.loads(call.function.arguments)) == {"a", "operator", "b"}
shown(f"{2 * len(QUESTIONS)} answers, whole and streamed", "a forced call")
