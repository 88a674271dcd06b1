// Vercel's AI SDK against the gateway: `node ai_sdk.mjs URL OPTIONS`, in a folder with its packages (`make test-clients`).
// OPTIONS are the provider's options. Five turns of a conversation with a tool, whole and streamed in turns. Prints JSON:
// the requests' bodies, the responses, and what each turn said.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, options] = process.argv.slice(2);
globalThis.AI_SDK_LOG_WARNINGS = false;
const exchanges = [];

function response(text) {
  if (!text.startsWith("event:")) return JSON.parse(text);
  const events = text.split("\n").filter((line) => line.startsWith("data: "));
  return JSON.parse(events.at(-1).slice("data: ".length)).response;
}

async function noting(url, init) {
  const answer = await fetch(url, init);
  const told = answer.clone().text().then(response);
  exchanges.push(told.then((made) => ({ body: JSON.parse(init.body), status: answer.status, response: made })));
  return answer;
}

const model = createOpenAI({ baseURL, apiKey: "none", fetch: noting })("demo");
const tools = {
  get_weather: tool({
    description: "The weather.",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => "Quite mild.",
  }),
};
const messages = [];
const turns = [];
for (let turn = 0; turn < 5; turn++) {
  messages.push({ role: "user", content: `How is the weather on day ${turn}?` });
  const asked = {
    model,
    tools,
    stopWhen: stepCountIs(3),
    maxRetries: 0,
    providerOptions: { openai: JSON.parse(options) },
    system: "Be brief.",
    messages,
  };
  const result = turn % 2 ? streamText(asked) : await generateText(asked);
  const steps = await result.steps;
  turns.push(steps.map(({ text, reasoningText, toolCalls }) => ({ text, reasoningText, calls: toolCalls.length })));
  messages.push(...(await result.response).messages);
}
console.log(JSON.stringify({ exchanges: await Promise.all(exchanges), turns }));
