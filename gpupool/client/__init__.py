"""The Python client: `Client` blocks, `AsyncClient` awaits; both need only pyzmq and msgpack.

    with Client("tcp://127.0.0.1:5555") as client:
        reply = client.infer({"text": "hello"}, model="minilm", timeout=2.0)
        reply.result                                  # arrays come back as numpy's, where numpy is installed
        for reply in client.map(samples, concurrency=64):       # a request each
            ...
        for result in client.stream(samples, chunk=32):         # a request for each 32
            ...

A request that fails raises the exception of its code, all under GpuPoolError. What is worth another try is tried again within the
timeout (`retries`), and requests open when the connection breaks are sent again when it is back; `retry=False` promises that a
request never runs twice. `hedge_after` sends what is slow a second time. `AsyncClient` has the same methods with `await`; cancelling a task cancels its request in the pool.
"""

from gpupool.client.aio import AsyncClient
from gpupool.client.blocking import Client
from gpupool.client.calls import MAX_MESSAGE_BYTES
from gpupool.client.reply import Reply
from gpupool.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    Draining,
    ErrorCode,
    GpuPoolError,
    Internal,
    InvalidInput,
    ModelError,
    NoWorkers,
    OutOfMemory,
    Overloaded,
    Poison,
    TooLarge,
    UnknownModel,
    VersionMismatch,
    WorkerLost,
)
from gpupool.samples import Tensor

__all__ = [
    "MAX_MESSAGE_BYTES",
    "AsyncClient",
    "BadRequest",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "Draining",
    "ErrorCode",
    "GpuPoolError",
    "Internal",
    "InvalidInput",
    "ModelError",
    "NoWorkers",
    "OutOfMemory",
    "Overloaded",
    "Poison",
    "Reply",
    "Tensor",
    "TooLarge",
    "UnknownModel",
    "VersionMismatch",
    "WorkerLost",
]
