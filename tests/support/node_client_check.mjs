// What tests/processes/test_node_client.py runs in the example's folder: one promise of the client after the other.
// Prints "READY" when it has two requests open (3000, 3001) and wants the router to be killed, and "DONE" at the end.
import assert from "node:assert/strict";
import { Client, PoolError, tensor, toArray } from "./gpupool.js";

const endpoint = process.argv[2];
const client = new Client(endpoint, { timeoutMs: 20_000 });
const code = (promise) => promise.then(() => "ok", (error) => error.code ?? error.name);

// Results, in order of ids and not of arrival; values of every kind.
const samples = Array.from({ length: 200 }, (_, i) => ({ i, text: "grüße", big: 2 ** 40, list: [1, null, true, 0.5] }));
const replies = await Promise.all(samples.map((sample) => client.infer(sample)));
assert.deepEqual(replies.map((reply) => reply.result), samples);
assert.equal(replies[0].model, "toy");
assert.ok(replies[0].timings_ms.total >= 0);
assert.deepEqual((await client.infer([{ i: 1 }, { i: 2 }], { many: true })).result, [{ i: 1 }, { i: 2 }]);
assert.ok((await client.ping()) > 0);
assert.equal((await client.info()).models[0].name, "toy");

// Tensors, small ones in the body and large ones in buffers.
for (const length of [2, 20_000]) {
  const array = Float32Array.from({ length }, (_, i) => i / 2);
  const { result } = await client.infer({ x: tensor(array, [2, length / 2]) });
  assert.deepEqual(result.x.shape, [2, length / 2]);
  assert.deepEqual(toArray(result.x), array);
}

// Errors.
await assert.rejects(client.infer({ i: 7, do: "raise" }), (error) => {
  assert.ok(error instanceof PoolError);
  assert.deepEqual([error.code, error.retryable], ["model_error", false]);
  return /sample 7 is bad/.test(error.message);
});
assert.equal(await code(client.infer({}, { model: "none" })), "unknown_model");

// A time limit, and a cancel: the pool is told, so what waits behind is never run.
const slow = { do: "sleep", s: 3 };
const held = [client.infer({ i: 1000, ...slow }), client.infer({ i: 1001, ...slow })]; // both workers
const controller = new AbortController();
const waiting = [
  client.infer({ i: 2000 }, { timeoutMs: 200 }),
  client.infer({ i: 2001 }, { signal: controller.signal }),
  client.infer({ i: 2002 }),
];
setTimeout(() => controller.abort(), 100);
assert.deepEqual(await Promise.all(waiting.slice(0, 2).map(code)), ["deadline_exceeded", DOMException.ABORT_ERR]);
assert.equal((await waiting[2]).result.i, 2002);
await Promise.all(held);

// A router that is killed: open requests are sent again, but for those that must not run twice.
const open = [client.infer({ i: 3000, ...slow }), code(client.infer({ i: 3001, ...slow }, { retry: false }))];
console.log("READY");
assert.equal((await open[0]).result.i, 3000);
assert.equal(await open[1], "worker_lost");

// Closing cancels what is open; later calls are refused.
const last = code(client.infer({ i: 4000, ...slow }));
await client.close();
assert.equal(await last, "cancelled");
assert.equal(await code(client.infer({})), "cancelled");

// A pool that is not there.
const nobody = new Client("tcp://127.0.0.1:1");
assert.equal(await code(nobody.infer({}, { timeoutMs: 200 })), "deadline_exceeded");
await nobody.close();
console.log("DONE");
