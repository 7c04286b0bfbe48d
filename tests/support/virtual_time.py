"""Virtual time for many actors: a heap of events, each some actor's, and messages that keep their order between any two.

An actor that is frozen keeps what comes to it for later; one that is dead lets it fall. Nothing here waits, and one seed makes one story.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush

Act = Callable[[], None]

#: The longest time that a message is on its way, in seconds.
TRANSIT_S = 0.002
_SHORTEST_S = 0.00005
#: After a pause of the host its processes come round within this time, in any order.
_RESUMPTION_S = 0.05


class Actor:
    """Somebody to whom things happen: a process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.kept: list[Act] = []  # what came while it was frozen, in order


class Timeline:
    """The clock and all that is yet to happen. `now` in seconds."""

    def __init__(self, rng: random.Random, start: float = 1000.0) -> None:
        self.now = start
        self.paused_s = 0.0
        self._rng = rng
        self._heap: list[tuple[float, int, Actor, Act]] = []
        self._count = 0
        self._last: dict[tuple[str, Actor], float] = {}

    def after(self, seconds: float, actor: Actor, act: Act) -> None:
        """Let an actor do something later, if it is still there then."""
        self._push(self.now + seconds, actor, act)

    def send(self, line: str, receiver: Actor, act: Act) -> None:
        """Bring a message to an actor. Messages on one line to one receiver keep their order."""
        at = max(self.now + self._rng.uniform(_SHORTEST_S, TRANSIT_S), self._last.get((line, receiver), 0.0))
        self._last[line, receiver] = at
        self._push(at, receiver, act)

    def step(self, until: float) -> bool:
        """Let the next event happen, if there is one before `until`."""
        while self._heap and self._heap[0][0] <= until:
            at, _, actor, act = heappop(self._heap)
            if not actor.alive:
                continue
            self.now = max(self.now, at)
            if actor.frozen:
                actor.kept.append(act)
                continue
            act()
            return True
        self.now = max(self.now, until)
        return False

    def thaw(self, actor: Actor) -> None:
        """Let a frozen actor go on: it does at once what it could not do before."""
        if actor.frozen:
            actor.frozen = False
            kept, actor.kept = actor.kept, []
            for act in kept:
                self._push(self.now, actor, act)

    def pause(self, seconds: float) -> None:
        """Stop the whole host: time goes on and nothing happens. Then all is late, and the processes resume in any order."""
        self.now += seconds
        self.paused_s += seconds
        offsets: dict[Actor, float] = {}
        due = sorted(entry for entry in self._heap if entry[0] <= self.now + _RESUMPTION_S)
        self._heap = [entry for entry in self._heap if entry[0] > self.now + _RESUMPTION_S]
        heapify(self._heap)
        for at, _, actor, act in due:
            offset = offsets.setdefault(actor, self._rng.uniform(0.0, _RESUMPTION_S))
            self._push(max(at, self.now + offset), actor, act)
        for (line, receiver), at in self._last.items():
            self._last[line, receiver] = max(at, self.now + offsets.get(receiver, 0.0))

    def _push(self, at: float, actor: Actor, act: Act) -> None:
        self._count += 1
        heappush(self._heap, (at, self._count, actor, act))
