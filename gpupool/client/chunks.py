"""Many small samples as fewer, larger requests: an iterable cut into chunks, and a chunk's reply into its samples' results."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import Any

from gpupool.client.reply import Reply
from gpupool.errors import GpuPoolError, Internal
from gpupool.wire import MAX_ROWS


class Chunks:
    """Cuts samples into lists of `size`, the last one shorter, and remembers how long those are that were taken."""

    def __init__(self, size: int) -> None:
        if not 1 <= size <= MAX_ROWS:
            raise ValueError(f"chunk: expected 1 to {MAX_ROWS} samples, got {size}")
        self._size = size
        self._lengths: deque[int] = deque()

    def cut(self, samples: Iterable[object]) -> Iterator[list[object]]:
        """Cut a plain iterable."""
        source = iter(samples)
        while chunk := list(islice(source, self._size)):
            self._lengths.append(len(chunk))
            yield chunk

    async def cut_async(self, samples: AsyncIterable[object]) -> AsyncIterator[list[object]]:
        """Cut an async iterable; a chunk waits until it is full."""
        chunk: list[object] = []
        async for sample in samples:
            chunk.append(sample)
            if len(chunk) == self._size:
                self._lengths.append(len(chunk))
                yield chunk
                chunk = []
        if chunk:
            self._lengths.append(len(chunk))
            yield chunk

    def spread(self, outcome: Reply | GpuPoolError, *, return_exceptions: bool) -> list[Any]:
        """Return the results of the oldest chunk that was not spread yet: one for each of its samples, errors too.

        Raises:
            Internal: the pool answered with another number of results; returned instead with `return_exceptions`.
        """
        length = self._lengths.popleft()
        if isinstance(outcome, Reply):
            results = outcome.result
            if isinstance(results, list) and len(results) == length:
                return results
            got = f"{len(results)} results" if isinstance(results, list) else type(results).__name__
            outcome = Internal(f"the pool answered {got} to {length} samples", retryable=False)
            if not return_exceptions:
                raise outcome
        return [outcome] * length
