"""The life of one request, put together from log records: where its time went, part by part, and what happened around it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

Record = dict[str, Any]

#: What may happen to a worker, or to all, that explains what became of a request there.
AROUND: Final = (
    "worker_exited", "worker_lost", "worker_stuck", "worker_late", "worker_leaving", "worker_unreachable", "worker_condemned",
    "worker_signalled", "worker_sick", "worker_cannot_start", "card_lost", "card_quarantined", "card_throttled", "request_poisoned",
    "router_exited", "limits_set", "stop_asked", "drill_began",
)  # fmt: skip
#: Tells which card a worker has.
_SPAWNED: Final = "worker_spawned"
REDISPATCHED: Final = "request_redispatched"
STAGES: Final = ("queue", "preprocess", "forward", "postprocess")
#: Reasons for which a request comes back from a worker that lives, or never got it.
_GIVEN_BACK: Final = ("bye", "send_failed")
#: What happened so much before a request came, or after it was answered, still belongs to it.
_NEAR_S: Final = 1.0
#: Lives that are kept, the newest; redispatches and events that are remembered until a request's own record comes.
_MOST_LIVES: Final = 100
_MOST_EVENTS: Final = 2000
_MOST_MOVES: Final = 100
#: A record is written a little later than what it tells of.
_LAG_S: Final = 0.05
#: Six figures in milliseconds, each rounded to three decimals, add up to the total within this.
_ROUNDING_US: Final = 10


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a request's time, in microseconds; `worker` where it passed at one."""

    name: str
    us: int
    worker: int | None = None


@dataclass(slots=True)
class Life:
    """One request: its own record (None: not in the log), the records of its returns, and those of what happened around it."""

    record: Record | None
    moves: list[Record]
    around: list[Record] = field(default_factory=list)
    devices: dict[int, str] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """When it was last heard of, in epoch seconds."""
        return _time(self.record if self.record is not None else self.moves[-1])

    @property
    def began(self) -> float:
        """When it came, in epoch seconds, as far as that is known."""
        if self.record is not None:
            return self.end - _us(self.record, "total_ms") / 1e6
        first = self.moves[0]
        return _time(first) - (_us(first, "pending_ms") + _us(first, "held_ms")) / 1e6

    @property
    def workers(self) -> list[int]:
        """Where it was, in order."""
        slots = [m.get("worker") for m in (*self.moves, self.record or {})]
        return list(dict.fromkeys(slot for slot in slots if isinstance(slot, int)))

    def concerns(self, event: Mapping[str, Any]) -> bool:
        """Whether an event belongs to this life: near in time, and about one of its workers, or about all."""
        if not self.began - _NEAR_S <= _time(event) <= self.end + _NEAR_S:
            return False
        if event.get("request_id") is not None:
            whose = self.record if self.record is not None else self.moves[0]
            return bool(event["request_id"] == whose.get("request_id") and event.get("client") == whose.get("client"))
        return event.get("worker") is None or event["worker"] in self.workers


class Lives:
    """Takes a log's records in order; afterwards `found` has the lives of one request id, the newest first."""

    def __init__(self, request_id: str, client: str | None = None) -> None:
        self._id, self._client = request_id, client
        self._moves: dict[str, deque[Record]] = {}  # by client, of requests whose own record has not come
        self._recent: deque[Record] = deque(maxlen=_MOST_EVENTS)
        self._lives: deque[Life] = deque(maxlen=_MOST_LIVES)
        self._devices: dict[int, str] = {}
        self.left_out = 0

    @property
    def needles(self) -> list[bytes]:
        """What a line that matters holds."""
        return [
            json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogateescape") for name in (self._id, *AROUND, _SPAWNED)
        ]

    def take(self, record: Record) -> None:
        """Take one record."""
        event = record.get("event")
        if event in AROUND:
            self._recent.append(record)
            for life in self._lives:
                if life.concerns(record):
                    life.around.append(record)
        elif event == _SPAWNED:
            if isinstance(record.get("worker"), int):
                self._devices[record["worker"]] = str(record.get("device"))
        elif record.get("request_id") == self._id and self._client in (None, record.get("client"), record.get("user")):
            client = str(record.get("client"))
            if event == REDISPATCHED:
                self._moves.setdefault(client, deque(maxlen=_MOST_MOVES)).append(record)
                if len(self._moves) > _MOST_LIVES:
                    self._add(Life(None, list(self._moves.pop(next(iter(self._moves))))))
            elif event == "request":
                self._end(record, self._moves.pop(client, ()))

    def found(self) -> list[Life]:
        """Return the lives, the newest first; those that have not ended, or whose own record is left out, too."""
        for moves in self._moves.values():
            self._add(Life(None, list(moves)))
        self._moves.clear()
        return sorted(self._lives, key=lambda life: -life.end)

    def _end(self, record: Record, moves: Iterable[Record]) -> None:
        life = Life(record, [])
        before = [move for move in moves if _time(move) < life.began - _LAG_S]
        if before:  # of an earlier request with this id, whose own record is not in the log
            self._add(Life(None, before))
        life.moves = [move for move in moves if _time(move) >= life.began - _LAG_S]
        self._add(life)

    def _add(self, life: Life) -> None:
        life.devices = dict(self._devices)
        life.around = [event for event in self._recent if life.concerns(event)]
        self.left_out += len(self._lives) == _MOST_LIVES
        self._lives.append(life)


def parts(record: Mapping[str, Any], moves: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Split a request's whole time; the parts add up to its total. Empty for one that was refused at the door.

    What is left over is named too: between router and worker, and at the worker until its reply came. It is negative only when the
    records contradict each other by more than rounding explains.
    """
    if not isinstance(record.get("total_ms"), int | float):
        return []
    total, waited = _us(record, "total_ms"), 0
    made: list[Part] = []
    for move in moves:
        before, waited = waited, _us(move, "pending_ms")
        made.append(Part("pending" if not made else "pending again", waited - before))
        made.append(Part(_how_it_came_back(move), _us(move, "held_ms"), move.get("worker")))
    again = "pending again" if moves else "pending"
    worker = record.get("worker")
    if worker is None or _waited_to_its_end(record, moves):
        made.append(Part(again, total - sum(part.us for part in made)))
        return _rounded(made)
    made.append(Part(again, _us(record, "pending_ms") - waited))
    stages = [Part(name, _us(record, f"{name}_ms"), worker) for name in STAGES]
    rest = total - sum(part.us for part in (*made, *stages))
    if record.get("batch_size") or any(part.us for part in stages):
        return _rounded([*made, *stages, Part("transport and waiting for reply", rest, worker)])
    return _rounded([*made, Part("at the worker, unanswered", rest, worker)])


def untold(record: Mapping[str, Any], moves: Sequence[Mapping[str, Any]]) -> int:
    """Count the returns from workers that the log has no line of; what passed there is in the last part."""
    sends = record.get("sends")
    returns = sends - (not _waited_to_its_end(record, moves)) if isinstance(sends, int) else 0
    return max(0, returns - len(moves))


def _waited_to_its_end(record: Mapping[str, Any], moves: Sequence[Mapping[str, Any]]) -> bool:
    return bool(moves) and moves[-1].get("ticket") == record.get("ticket")


def _how_it_came_back(move: Mapping[str, Any]) -> str:
    reason = move.get("reason")
    return f"given back there ({reason})" if reason in _GIVEN_BACK else f"lost there ({reason})"


def _rounded(made: list[Part]) -> list[Part]:
    """Take what rounding has made too much from the longest parts, so that none is below zero for that."""
    us = [part.us for part in made]
    for n in range(len(us)):
        while -_ROUNDING_US <= us[n] < 0 < max(us):
            us[us.index(max(us))] -= 1
            us[n] += 1
    return [replace(part, us=value) for part, value in zip(made, us, strict=True)]


def _us(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    return round(value * 1e3) if isinstance(value, int | float) else 0


def _time(record: Mapping[str, Any]) -> float:
    time = record.get("time")
    return float(time) if isinstance(time, int | float) else 0.0
