"""langchain-openai: invoke, stream, a bound tool, structured output."""

from _shared import BASE, CALCULATOR, KEY, MODEL, QUESTIONS, alone, same, shown
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=MODEL, base_url=f"{BASE}/v1", api_key=KEY, temperature=0, max_tokens=96)
for question in QUESTIONS:
    expected = alone(question)
    same(model.invoke(question).content, expected)
    same("".join(piece.content for piece in model.stream(question)), expected)

tool = {"type": "function", "function": {"name": "calculator", "description": "computes", "parameters": CALCULATOR}}
(call,) = model.bind_tools([tool], tool_choice="calculator").invoke("Calculate 3 + 4.").tool_calls
assert call["name"] == "calculator"
assert set(call["args"]) == {"a", "operator", "b"}
schema = {"title": "sum", **CALCULATOR}
for method in ("json_schema", "function_calling"):
    found = model.with_structured_output(schema, method=method).invoke("Calculate 3 + 4.")
    assert set(found) == {"a", "operator", "b"}, found
shown(f"{2 * len(QUESTIONS)} answers, whole and streamed", "a bound tool", "structured output by schema and by tool")
