"""llama-index through its OpenAI-like model: chat, streamed chat, completion."""

from _shared import BASE, KEY, MODEL, QUESTIONS, UNIFIED, alone, post, same, shown
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

SERVED = {"model": MODEL, "api_base": f"{BASE}/v1", "api_key": KEY, "temperature": 0, "context_window": 8192}

model = OpenAILike(**SERVED, max_tokens=96, is_chat_model=True)
for question in QUESTIONS:
    expected, messages = alone(question), [ChatMessage(role="user", content=question)]
    same(model.chat(messages).message.content, expected)
    same("".join(piece.delta or "" for piece in model.stream_chat(messages)), expected)

plain = OpenAILike(**SERVED, max_tokens=48, is_chat_model=False)
prompt = f"Question: {QUESTIONS[1]}\nAnswer:"
body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0}
same(plain.complete(prompt).text, post(f"{UNIFIED}/v1/completions", body)["choices"][0]["text"])
shown(f"{2 * len(QUESTIONS)} chats, whole and streamed", "a completion")
