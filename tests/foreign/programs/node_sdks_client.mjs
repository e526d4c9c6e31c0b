// The SDKs of OpenAI and Anthropic for Node: answers whole and streamed, their own loops of tools with calls that
// nothing forces, objects by a schema, a conversation that the router keeps, refusals, a stream that is left.

import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";

import { compute, MODEL as model, PROBLEMS, QUESTIONS, same, SUM, SYSTEM, UNIFIED, URL } from "./_shared.mjs";

const calculator = {
  name: "calculator",
  description: "Evaluates an arithmetic expression.",
  parameters: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
};

const openai = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const alone = new OpenAI({ baseURL: `${UNIFIED}/v1`, apiKey: "none", maxRetries: 0 });
const usual = { model, temperature: 0, max_tokens: 160 };
const items = { model, temperature: 0, max_output_tokens: 160 };
const told = { answers: 0, solved: 0, objects: 0 };

const user = (content) => [{ role: "user", content }];
const chat = async (client, question) =>
  (await client.chat.completions.create({ ...usual, messages: user(question) })).choices[0].message.content;
const ways = [
  (question) => chat(openai, question),
  (question) => openai.chat.completions.stream({ ...usual, messages: user(question) }).finalContent(),
  async (question) => (await openai.responses.create({ ...items, input: question })).output_text,
  async (question) => (await openai.responses.stream({ ...items, input: question }).finalResponse()).output_text,
  async (question) => (await anthropic.messages.create({ ...usual, messages: user(question) })).content[0].text,
  (question) => anthropic.messages.stream({ ...usual, messages: user(question) }).finalText(),
];
for (const question of QUESTIONS) {
  const expected = await chat(alone, question);
  for (const way of ways) {
    same(await way(question), expected);
    told.answers += 1;
  }
}

for (const { question, answer } of PROBLEMS) {
  for (const stream of [false, true]) {
    const tool = { type: "function", function: { ...calculator, parse: JSON.parse, function: compute } };
    const messages = [{ role: "system", content: SYSTEM }, ...user(question)];
    const loop = openai.chat.completions.runTools({ ...usual, stream, messages, tools: [tool] });
    same(await loop.finalContent(), `#### ${answer}`);
  }
  const { parameters, ...named } = calculator;
  const tools = [betaTool({ ...named, inputSchema: parameters, run: compute })];
  const last = await anthropic.beta.messages.toolRunner({ ...usual, system: SYSTEM, messages: user(question), tools });
  same(last.content[0].text, `#### ${answer}`);
  told.solved += 1;
}

const format = zodResponseFormat(SUM, "sum");
const asked = { ...usual, messages: user("Calculate 3 + 4."), response_format: format };
const item = { ...items, input: "Calculate 3 + 4.", text: { format: zodTextFormat(SUM, "sum") } };
for (const found of [
  (await openai.chat.completions.parse(asked)).choices[0].message.parsed,
  (await openai.chat.completions.stream(asked).finalChatCompletion()).choices[0].message.parsed,
  (await openai.responses.parse(item)).output_parsed,
]) {
  SUM.parse(found);
  told.objects += 1;
}

const first = await openai.responses.create({ ...items, input: QUESTIONS[0] });
const second = await openai.responses.create({ ...items, input: QUESTIONS[2], previous_response_id: first.id });
const said = [];
for await (const item of openai.responses.inputItems.list(second.id, { order: "asc" })) said.push(item.role);
same(said.join(), "user,assistant,user");

const long = user("hello ".repeat(20000));
for (const [refused, kind] of [
  [() => openai.chat.completions.create({ ...usual, messages: long }), OpenAI.BadRequestError],
  [() => openai.responses.create({ ...items, input: long[0].content, stream: true }), OpenAI.BadRequestError],
  [() => anthropic.messages.create({ ...usual, messages: long }), Anthropic.BadRequestError],
  [() => openai.chat.completions.create({ ...usual, model: "nobody", messages: user("Hello!") }), OpenAI.NotFoundError],
]) {
  const error = await refused().then(() => null, (refusal) => refusal);
  if (!(error instanceof kind)) throw new Error(`it was to be refused, and is ${error}`);
}

const endless = { ...usual, max_tokens: 4000, ignore_eos: true, stream: true, messages: user(QUESTIONS[0]) };
const stream = await openai.chat.completions.create(endless);
let pieces = 0;
for await (const piece of stream) if (++pieces === 5) stream.controller.abort();
if (pieces > 500) throw new Error("a stream that was left went on");

console.log(
  `SHOWN ${told.answers} answers of chats, responses and messages, whole and streamed, ${told.solved} held-out ` +
    `problems solved by the loops of both with calls that nothing forced, ${told.objects} objects by a schema, ` +
    "a conversation that the router keeps, 4 refusals as the SDK's own errors",
);
