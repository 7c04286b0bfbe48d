// node example.js tcp://127.0.0.1:5555
import { Client, PoolError } from "./gpupool.js";

const client = new Client(process.argv[2] ?? "tcp://127.0.0.1:5555", { timeoutMs: 5000 });
try {
  const pool = await client.info();
  console.log(`pool ${pool.pool} serves ${pool.models.map((model) => model.name).join(", ")}`);
  const reply = await client.infer({ x: 14 });
  console.log(reply.result, `from worker ${reply.worker} in ${reply.timings_ms.total} ms`);
} catch (error) {
  if (!(error instanceof PoolError)) throw error;
  console.error(`${error.code}: ${error.message}`, error.retryable ? "(may succeed later)" : "");
  process.exitCode = 1;
} finally {
  await client.close();
}
