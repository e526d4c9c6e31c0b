// Vercel's AI SDK with the providers that its users have: answers whole and streamed, conversations, loops of calls
// that nothing forces, objects by a schema, a refusal. `openai` speaks /v1/responses, which is its default, and in a
// conversation names items of earlier responses; `open` sends all of them.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenResponses } from "@ai-sdk/open-responses";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { compute, MODEL, PROBLEMS, QUESTIONS, same, SUM, SYSTEM, UNIFIED, URL } from "./_shared.mjs";

const settings = { baseURL: `${URL}/v1`, apiKey: "none" };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({ ...settings, name: "tandem", includeUsage: true, supportsStructuredOutputs: true });
const models = {
  responses: openai(MODEL),
  open: createOpenResponses({ name: "tandem", url: `${URL}/v1/responses`, apiKey: "none" })(MODEL),
  chat: openai.chat(MODEL),
  compatible: compatible(MODEL),
  anthropic: createAnthropic(settings)(MODEL),
};
const usual = { temperature: 0, maxOutputTokens: 160, maxRetries: 0 };
const told = { answers: 0, solved: 0, objects: 0, turns: 0 };

async function alone(question, before = []) {
  const messages = [...before, { role: "user", content: question }];
  const body = JSON.stringify({ model: MODEL, messages, max_tokens: usual.maxOutputTokens, temperature: 0 });
  const headers = { "content-type": "application/json" };
  const reply = await fetch(`${UNIFIED}/v1/chat/completions`, { method: "POST", headers, body });
  return (await reply.json()).choices[0].message.content;
}

const calculator = tool({
  description: "Evaluates an arithmetic expression.",
  inputSchema: z.object({ expression: z.string() }),
  execute: compute,
});

for (const model of Object.values(models)) {
  for (const prompt of QUESTIONS) {
    const expected = await alone(prompt);
    const whole = await generateText({ ...usual, model, prompt });
    same(whole.text, expected);
    const stream = streamText({ ...usual, model, prompt });
    let pieces = "";
    for await (const piece of stream.textStream) pieces += piece;
    same(pieces, expected);
    same((await stream.usage).outputTokens, whole.usage.outputTokens);
    told.answers += 2;
  }
  const [ours, theirs] = [[], []];
  for (const content of QUESTIONS) {
    const expected = await alone(content, theirs);
    ours.push({ role: "user", content });
    theirs.push({ role: "user", content }, { role: "assistant", content: expected });
    const { text, response } = await generateText({ ...usual, model, messages: ours });
    same(text, expected);
    ours.push(...response.messages);
    told.turns += 1;
  }
  for (const { question, answer } of PROBLEMS) {
    const loop = { ...usual, model, system: SYSTEM, prompt: question, tools: { calculator }, stopWhen: stepCountIs(4) };
    same((await generateText(loop)).text, `#### ${answer}`);
    same(await streamText(loop).text, `#### ${answer}`);
    told.solved += 1;
  }
  // Anthropic's provider leaves bounds of numbers out of the schema, and so the model may go on for ever.
  if (model === models.anthropic) continue;
  SUM.parse((await generateObject({ ...usual, model, schema: SUM, prompt: "Calculate 3 + 4." })).object);
  told.objects += 1;
}
for (const model of Object.values(models)) {
  try {
    await generateText({ ...usual, model, prompt: "hello ".repeat(20000) });
    throw new Error("a prompt without end is taken");
  } catch (refusal) {
    if (!APICallError.isInstance(refusal)) throw refusal;
    same([refusal.statusCode, refusal.isRetryable, /maximum context length/.test(refusal.message)].join(), "400,false,true");
  }
}
console.log(
  `SHOWN by ${Object.keys(models).length} providers ${told.answers} answers, whole and streamed, ` +
    `conversations of ${told.turns} turns, ${told.solved} held-out problems solved with calls that nothing forced, ` +
    `${told.objects} objects by a schema, and the refusal of a prompt that is too long`,
);
