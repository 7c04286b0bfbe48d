"""The router's line to the supervisor: what that does not take at once is kept, in order and within a bound, and offered again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from gpupool.channel import Channel

_MAX_UNTOLD: Final = 1000
#: Messages heard at a time: the rest comes with the loop's next round, since the descriptor tells as long as something waits.
_MAX_HEARD: Final = 100


class SupervisorLine:
    """One channel, with patience."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._untold: deque[dict[str, Any]] = deque(maxlen=_MAX_UNTOLD)

    def fileno(self) -> int:
        """Return the descriptor that tells of messages."""
        return self._channel.fileno()

    def tell(self, message: dict[str, Any]) -> None:
        """Say something, after all that is still to be said; beyond the bound the oldest is lost."""
        self._untold.append(message)
        self.flush()

    def flush(self) -> None:
        """Say what was not taken before, as far as it is taken now.

        Raises:
            ValueError: a message is too large ever to be taken. It is dropped: the others must not wait behind it.
        """
        while self._untold:
            try:
                taken = self._channel.send(self._untold[0])
            except ValueError:
                self._untold.popleft()
                raise
            if not taken:
                return
            self._untold.popleft()

    def hear(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that are there now, within a bound.

        Raises:
            EOFError: the supervisor is gone.
        """
        for _ in range(_MAX_HEARD):
            message = self._channel.receive()
            if message is None:
                return
            yield message
