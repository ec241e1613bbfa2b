// Streams answers to many users at once over gRPC, schema by reflection; every answer is checked.
//
//   k6 run -e ROUTER=127.0.0.1:7000 -e USERS=64 -e SECONDS=60 tests/client/k6/generate.js
//
// Users ask one of 16 prompts, each with a seed of its own, so the first answer to a prompt says what all others must be.
import { check, sleep } from 'k6';
import exec from 'k6/execution';
import grpc from 'k6/net/grpc';
import { Counter, Trend } from 'k6/metrics';

const ROUTER = __ENV.ROUTER || '127.0.0.1:7000';
const USERS = Number(__ENV.USERS || 64);
const SECONDS = Number(__ENV.SECONDS || 60);
const TOKENS = Number(__ENV.TOKENS || 16);
const METADATA = __ENV.TOKEN ? { authorization: `Bearer ${__ENV.TOKEN}` } : {};

const firstToken = new Trend('first_token', true);
const wholeAnswer = new Trend('whole_answer', true);
const tokens = new Counter('tokens');
const client = new grpc.Client();
const known = {};
let isConnected = false;

export const options = {
  scenarios: {
    // An answer that has begun may end.
    users: { executor: 'constant-vus', vus: USERS, duration: `${SECONDS}s`, gracefulStop: '60s' },
  },
  summaryTrendStats: ['med', 'p(99)', 'max'],
  thresholds: { checks: ['rate==1'], tokens: ['count>0'] },
};

export default function () {
  if (!isConnected) {
    client.connect(ROUTER, { plaintext: true, reflect: true, reflectMetadata: METADATA, timeout: '30s' });
    isConnected = true;
  }
  const number = (exec.vu.idInTest * 7 + exec.vu.iterationInInstance) % 16;
  const begin = Date.now();
  let [text, ids, finish, failure] = ['', [], null, null];
  const stream = new grpc.Stream(client, 'graftline.v1.RouterService/Generate', {
    metadata: METADATA,
  });
  stream.on('data', (message) => {
    if (message.tokenIds && message.tokenIds.length) {
      if (!ids.length) firstToken.add(Date.now() - begin);
      ids = ids.concat(message.tokenIds);
    }
    text += message.text || '';
    finish = message.finish || finish;
  });
  stream.on('error', (error) => {
    failure = error;
  });
  stream.on('end', () => {
    wholeAnswer.add(Date.now() - begin);
    tokens.add(ids.length);
    known[number] = known[number] || text;
    const passed = check(null, {
      'ends without an error': () => failure === null,
      'has all its tokens': () => ids.length === TOKENS && finish.usage.completionTokens === TOKENS,
      'says what it said before': () => text.length > 0 && text === known[number],
    });
    if (!passed) console.error(`${number}: ${ids.length} tokens, ${JSON.stringify(failure)}, ${JSON.stringify(text)}`);
  });
  stream.write({ text: `Fact number ${number} about grafting trees:`, seed: number, maxTokens: TOKENS, ignoreEos: true });
  stream.end();
  sleep(0);
}
