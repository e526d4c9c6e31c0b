// What the programs for Node have in common: where the servers are, what is asked, and what has to come.
import { readFileSync } from "node:fs";
import { z } from "zod";

export const { CLIENTS_URL: URL, CLIENTS_UNIFIED_URL: UNIFIED, CLIENTS_MODEL: MODEL } = process.env;
export const QUESTIONS = [
  "A ferry carries 245 people. At the first stop 38 get off and 17 get on. How many people are on the ferry now?",
  "Calculate 9 * 13 + 48.",
  "Hello!",
];
export const SUM = z.object({ a: z.number().int().min(0).max(99), operator: z.enum(["+", "-", "*"]) });
export const SYSTEM = "Use the calculator.";
export const PROBLEMS = readFileSync(`${process.env.CLIENTS_MODEL_DIR}/heldout.jsonl`, "utf8")
  .split("\n")
  .slice(0, 5)
  .map((line) => JSON.parse(line));

export function same(got, expected) {
  if (got === expected) return;
  throw new Error(`the pair answered ${JSON.stringify(got)}, expected ${JSON.stringify(expected)}`);
}

export function compute({ expression }) {
  if (!/^[0-9+*\-/(). ]+$/.test(expression)) throw new Error(`no expression: ${expression}`);
  return String(Function(`return ${expression}`)());
}
