import { createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { RouterService } from "./gen/graftline/v1/router_pb.js";

const [address, prompt, maxTokens] = process.argv.slice(2);
const client = createClient(RouterService, createGrpcTransport({ baseUrl: `http://${address}` }));
const tokens = [];
let text = "";
let finish;
const asked = { prompt: { case: "text", value: prompt }, maxTokens: BigInt(maxTokens), temperature: 0, seed: 5n };
for await (const message of client.generate(asked, { timeoutMs: 30000 })) {
  tokens.push(...message.tokenIds);
  text += message.text;
  finish = message.finish ?? finish;
}
const status = await client.getStatus({});
console.log(JSON.stringify({ tokens, text, output: finish.usage.completionTokens, workers: status.workers.length }));
