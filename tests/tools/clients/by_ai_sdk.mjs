// The AI SDK with its providers of OpenAI's and Anthropic's APIs: a tool, and a form.
import assert from "node:assert";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const tell = (way, kind, value) => console.log(JSON.stringify([way, kind, value]));
const weather = tool({
  description: "Tell the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `${city}: sunny`,
});
const river = z.object({ name: z.string(), bridges: z.array(z.number()) });

async function main(way, model) {
  const anthropic = { thinking: { type: "enabled", budgetTokens: 1024 } };
  const common = { model, maxRetries: 0, providerOptions: { anthropic } };
  const ask = (asked) => (way === "whole" ? generateText : streamText)({ ...common, ...asked });
  const said = await ask({ prompt: "How is it in Köln?", tools: { weather }, stopWhen: isStepCount(2) });
  let pieces = "";
  if (way === "streamed") for await (const piece of said.textStream) pieces += piece;
  const [first, last] = await said.steps;
  if (way === "streamed") assert.equal(pieces, first.text + last.text);
  tell(way, "thought", first.reasoningText);
  tell(way, "call", first.toolCalls[0].input);
  tell(way, "answer", last.text);
  const formed = await ask({ prompt: "Name a river.", output: Output.object({ schema: river }) });
  tell(way, "river", await formed.output);
}

const compatible = createOpenAICompatible({
  name: "here",
  baseURL: `${url}/v1`,
  apiKey: "any",
  supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "any" });
for (const way of ["whole", "streamed"]) {
  await main(way, compatible("counter"));
  await main(way, anthropic("claude-sonnet-4-5"));
}
