// A gpupool client for Node, written from docs/protocol.md: deadlines, cancelling, retries, lost connections.
import { decode, encode } from "@msgpack/msgpack";
import * as zmq from "zeromq";

const LINGER_MS = 200; // lets the last cancels leave
const FIRST_BACKOFF_MS = 250; // doubled with each failure
const MAX_BACKOFF_MS = 5000;
const RETRY_BURST = 100; // the retry budget: as many at once, and a fifth of the requests
const RETRY_SHARE = 0.2;
const NEVER_RAN = new Set(["overloaded", "no_workers", "draining"]);

/** What a request ends in that was not answered `ok`. */
export class PoolError extends Error {
  constructor({ code, message, retryable = false, retry_after_ms, field, attempts }) {
    super(message || code);
    Object.assign(this, { name: "PoolError", code, retryable, retryAfterMs: retry_after_ms, field, attempts });
  }
}

/** A typed array and its shape as the protocol's tensor (typed arrays are little-endian on every machine that Node runs on). */
export function tensor(array, shape = [array.length]) {
  const dtype = array.constructor.name.replace("Array", "").toLowerCase();
  return { dtype, shape, data: new Uint8Array(array.buffer, array.byteOffset, array.byteLength) };
}

/** The typed array of a tensor in a reply. */
export function toArray({ dtype, data }) {
  const kinds = { float32: Float32Array, float64: Float64Array, int32: Int32Array, uint8: Uint8Array, int8: Int8Array,
    int16: Int16Array, uint16: Uint16Array, uint32: Uint32Array };
  if (!(dtype in kinds)) throw new TypeError(`no typed array for ${dtype}`);
  return new kinds[dtype](new Uint8Array(data).buffer); // a copy: the bytes may stand anywhere in the message
}

export class Client {
  #socket;
  #endpoint;
  #open = new Map(); // request id -> call
  #unsent = []; // what goes out next: { call, id } for a request, { cancel: id } for a cancel
  #sending = false;
  #up = false; // between "handshake" and "disconnect"
  #wake = () => {}; // called when that changes
  #closed = false;
  #last = 0;
  #retryTokens = RETRY_BURST;

  /** curve: { serverKey, publicKey, secretKey } in Z85; without a pair of its own the client makes one up. */
  constructor(endpoint, { timeoutMs = 30_000, retries = 3, curve } = {}) {
    this.timeoutMs = timeoutMs;
    this.retries = retries;
    this.#endpoint = endpoint;
    this.#socket = new zmq.Dealer({
      sendTimeout: 100, // then look again whether the request is still wanted, and how much time it has left
      linger: LINGER_MS,
      receiveHighWaterMark: 0, // bounded by our own open requests
      reconnectInterval: 50,
      reconnectMaxInterval: 1000,
      heartbeatInterval: 10_000,
      heartbeatTimeout: 30_000,
    });
    if (curve) {
      const own = curve.secretKey ? curve : zmq.curveKeyPair();
      this.#socket.curveServerKey = curve.serverKey;
      this.#socket.curvePublicKey = own.publicKey;
      this.#socket.curveSecretKey = own.secretKey;
    }
    this.#socket.events.on("disconnect", () => this.#lost());
    this.#socket.events.on("handshake", () => {
      this.#up = true;
      this.#wake();
    });
    this.#socket.connect(endpoint);
    this.#receive();
  }

  /** Run one sample, or with `many` a list: { result, model, worker, timings_ms, … }, or a PoolError. */
  infer(sample, { timeoutMs = this.timeoutMs, retry = true, signal, ...header } = {}) {
    if (!retry) header.retry = false;
    return this.#call(header, [encode(sample)], { timeoutMs, repeatable: retry, signal });
  }

  /** The round trip to the router in milliseconds. */
  async ping({ timeoutMs = this.timeoutMs } = {}) {
    const began = performance.now();
    await this.#call({ type: "ping" }, [], { timeoutMs, repeatable: true });
    return performance.now() - began;
  }

  /** What the pool tells about itself. */
  async info({ timeoutMs = this.timeoutMs } = {}) {
    return (await this.#call({ type: "info" }, [], { timeoutMs, repeatable: true })).result;
  }

  /** Cancel what is open, and hang up. */
  async close() {
    if (this.#closed) return;
    for (const call of new Set(this.#open.values())) {
      this.#giveUp(call, new PoolError({ code: "cancelled", message: "the client was closed" }));
    }
    this.#closed = true;
    this.#wake();
    const end = Date.now() + LINGER_MS;
    while (this.#sending && Date.now() < end) await new Promise((done) => setTimeout(done, 5));
    this.#socket.close();
  }

  #call(header, frames, { timeoutMs, repeatable, signal }) {
    if (this.#closed) return Promise.reject(new PoolError({ code: "cancelled", message: "the client is closed" }));
    if (signal?.aborted) return Promise.reject(signal.reason);
    this.#retryTokens = Math.min(RETRY_BURST, this.#retryTokens + RETRY_SHARE);
    return new Promise((resolve, reject) => {
      const deadline = performance.now() + timeoutMs;
      const call = { header, frames, repeatable, resolve, reject, deadline, failures: 0, id: null, sent: false };
      const late = { code: "deadline_exceeded", retryable: true, message: `no reply within ${timeoutMs} ms` };
      call.timer = setTimeout(() => this.#giveUp(call, new PoolError(late)), timeoutMs);
      const aborted = () => this.#giveUp(call, signal.reason);
      signal?.addEventListener("abort", aborted, { once: true });
      call.forgetSignal = () => signal?.removeEventListener("abort", aborted);
      this.#queue(call);
    });
  }

  // Each try has an id of its own, so no answer can be taken for that of another.
  #queue(call) {
    this.#open.delete(call.id);
    const id = (call.id = String(++this.#last));
    this.#open.set(id, call);
    call.sent = false;
    this.#send({ call, id });
  }

  // A socket takes one message at a time. What it took just after a disconnection it would lose: so none until the next handshake.
  async #send(item) {
    this.#unsent.push(item);
    if (this.#sending) return;
    this.#sending = true;
    while (this.#unsent.length) {
      if (!this.#up) {
        if (this.#closed) break;
        await new Promise((resolve) => (this.#wake = resolve));
        continue;
      }
      const { call, id, cancel } = this.#unsent[0];
      try {
        if (cancel) {
          await this.#socket.send([encode({ v: 1, type: "cancel", id: cancel })]);
        } else if (call.id === id) { // else it has ended
          const timeout_ms = Math.max(1, Math.ceil(call.deadline - performance.now())); // what is left now
          await this.#socket.send([encode({ v: 1, ...call.header, id, timeout_ms }), ...call.frames]);
          if (call.id === id) call.sent = true;
          else if (call.id === null) this.#unsent.push({ cancel: id }); // it ended in this very moment
        }
        this.#unsent.shift();
      } catch (error) {
        if (this.#closed) break;
        if (error.code === "EAGAIN") continue;
        this.#unsent.shift();
        if (call?.id === id) this.#end(call, call.reject, error);
      }
    }
    this.#sending = false;
  }

  async #receive() {
    for await (const frames of this.#socket) {
      try {
        this.#reply(frames);
      } catch (error) {
        console.warn(`a message that is no reply: ${error.message}`);
      }
    }
  }

  #reply([head, body, ...buffers]) {
    const header = decode(head);
    const call = this.#open.get(header.id);
    if (!call) return; // an answer to what was given up
    if (header.code === "ok") {
      try {
        const result = body.length ? inPlace(decode(body), buffers) : null;
        return this.#end(call, call.resolve, { ...header, result });
      } catch (error) {
        const unreadable = { code: "internal", message: `the reply cannot be read: ${error.message}` };
        return this.#end(call, call.reject, new PoolError(unreadable));
      }
    }
    const error = new PoolError(header);
    const wait = (header.retry_after_ms ?? 0) + Math.random() * Math.min(MAX_BACKOFF_MS, FIRST_BACKOFF_MS * 2 ** call.failures);
    const mayRepeat = call.repeatable || (NEVER_RAN.has(header.code) && !header.attempts);
    const inTime = performance.now() + wait < call.deadline && header.code !== "deadline_exceeded";
    if (!(header.retryable && mayRepeat && inTime && call.failures < this.retries && this.#retryTokens >= 1)) {
      return this.#end(call, call.reject, error);
    }
    this.#retryTokens -= 1;
    call.failures += 1;
    this.#open.delete(call.id);
    call.id = Symbol("waits for its retry");
    this.#open.set(call.id, call);
    call.sent = false;
    call.retryTimer = setTimeout(() => this.#queue(call), wait);
  }

  // The connection broke: whatever was sent on it has no reply to hope for.
  #lost() {
    if (this.#up) {
      // What libzmq still has for the old connection must not arrive beside what is sent again.
      this.#socket.disconnect(this.#endpoint);
      this.#socket.connect(this.#endpoint);
    }
    this.#up = false;
    const unknown = { code: "worker_lost", message: "connection lost; whether the request ran is not known" };
    for (const call of new Set(this.#open.values())) {
      if (!call.sent) continue;
      if (call.repeatable) this.#queue(call);
      else this.#end(call, call.reject, new PoolError(unknown));
    }
  }

  #giveUp(call, reason) {
    const { id, sent } = call;
    if (!this.#end(call, call.reject, reason) || !sent) return;
    this.#send({ cancel: id });
  }

  #end(call, settle, value) {
    if (!this.#open.delete(call.id)) return false;
    call.id = null;
    clearTimeout(call.timer);
    clearTimeout(call.retryTimer);
    call.forgetSignal();
    settle(value);
    return true;
  }
}

// Put the bytes of buffer frames where tensors name them by number.
function inPlace(node, buffers) {
  if (Array.isArray(node)) return node.map((member) => inPlace(member, buffers));
  if (node === null || typeof node !== "object" || node instanceof Uint8Array) return node;
  const isTensor = Object.keys(node).length === 3 && "dtype" in node && "shape" in node && "data" in node;
  if (isTensor) return Number.isInteger(node.data) ? { ...node, data: buffers[node.data] } : node;
  return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, inPlace(value, buffers)]));
}
