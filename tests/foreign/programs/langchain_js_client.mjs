// LangChain for Node by chats and by responses: answers whole and streamed, in batches and over several turns, objects
// by a schema and by a tool, agents on LangGraph whose calls nothing forces.

import { tool } from "@langchain/core/tools";
import { createReactAgent } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

import { compute, MODEL, PROBLEMS, QUESTIONS, same, SUM, SYSTEM, UNIFIED, URL } from "./_shared.mjs";

const usual = { model: MODEL, apiKey: "none", temperature: 0, maxTokens: 160, maxRetries: 0 };
const model = (url, useResponsesApi) =>
  new ChatOpenAI({ ...usual, useResponsesApi, configuration: { baseURL: `${url}/v1` } });
const alone = model(UNIFIED, false);
const calculator = tool(compute, {
  name: "calculator",
  description: "Evaluates an arithmetic expression.",
  schema: z.object({ expression: z.string() }),
});
const told = { answers: 0, solved: 0, objects: 0, turns: 0 };

for (const llm of [model(URL, false), model(URL, true)]) {
  const batch = await llm.batch(QUESTIONS);
  const [ours, theirs] = [[], []];
  for (const [index, question] of QUESTIONS.entries()) {
    const expected = (await alone.invoke(question)).text;
    let pieces = "";
    for await (const piece of await llm.stream(question)) pieces += piece.text;
    for (const said of [batch[index].text, pieces, (await llm.invoke(question)).text]) same(said, expected);
    told.answers += 3;
    ours.push(["user", question]);
    theirs.push(["user", question]);
    ours.push(await llm.invoke(ours));
    theirs.push(await alone.invoke(theirs));
    same(ours.at(-1).text, theirs.at(-1).text);
    told.turns += 1;
  }
  for (const method of ["jsonSchema", "functionCalling"]) {
    SUM.parse(await llm.withStructuredOutput(SUM, { method, name: "calculator" }).invoke("Calculate 3 + 4."));
    told.objects += 1;
  }
  const agent = createReactAgent({ llm, tools: [calculator], prompt: SYSTEM });
  for (const { question, answer } of PROBLEMS) {
    const asked = { messages: [["user", question]] };
    same((await agent.invoke(asked)).messages.at(-1).text, `#### ${answer}`);
    let last;
    for await (const state of await agent.stream(asked, { streamMode: "values" })) last = state.messages.at(-1);
    same(last.text, `#### ${answer}`);
    told.solved += 1;
  }
}
console.log(
  `SHOWN by chats and responses ${told.answers} answers, whole, streamed and in batches, conversations of ` +
    `${told.turns} turns, ${told.solved} held-out problems solved by agents with calls that nothing forced, ` +
    `${told.objects} objects by a schema and by a tool`,
);
