"""The board: one sealed page of shared memory in which supervisor, router and workers read each other's state.

It is a memfd that children inherit as a descriptor: no name to leak or to guess, immune to a full /dev/shm, and sealed against
shrinking so that no access can end in SIGBUS. Every word has one writer and is one aligned 64-bit store through
`memoryview.cast("Q")`; `struct.pack_into` clears its target first, and readers saw zeros in a fifth of all reads. Only a
single word is consistent, so what must be read together shares one (see `pack_queue`).

Layout, in 64-bit words: a header of HEADER_WORDS, then per slot SLOT_WORDS words of state, TICKET_WORDS words that name the requests of the
running batch, and LANE_WORDS words that name what the model's code has beside it, one for each thread. Readers treat an impossible value as unknown, never as empty.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MAGIC: Final = 0x47505550_4F4F4C31  # "GPUPOOL1"
LAYOUT: Final = 2
HEADER_WORDS: Final = 512
SLOT_WORDS: Final = 32
#: Requests of one running batch that can be named. A larger batch is marked OVERFLOW: then all that the worker held is suspect.
TICKET_WORDS: Final = 256
TICKETS_OVERFLOW: Final = TICKET_WORDS + 1
#: Threads beside the batch's: lane 0 is the link's, each thread that preprocesses has one of the others.
LANE_WORDS: Final = 128
_STRIDE: Final = SLOT_WORDS + TICKET_WORDS + LANE_WORDS
MAX_SLOTS: Final = 256
ENV_FD: Final = "GPUPOOL_BOARD_FD"


class Word(IntEnum):
    """Header words; the writer in brackets."""

    MAGIC = 0  # [supervisor]
    LAYOUT = 1  # [supervisor]
    SLOTS = 2  # [supervisor]
    ROUTER_EPOCH = 3  # [supervisor] which router process is the present one; workers register anew when it changes
    LOG_LEVEL = 4  # [supervisor] as in logging: 10 debug … 40 error
    ROUTER_LOG_LEVEL = 5  # [supervisor] the router's own; 0: as LOG_LEVEL
    ROUTER_BEAT_NS = 16  # [router]


class SlotWord(IntEnum):
    """Words of one slot; the writer in brackets. Instants are CLOCK_MONOTONIC nanoseconds, 0 means none."""

    INCARNATION = 0  # [worker] written last at attach: the record is this process's from then on
    PID = 1  # [worker]
    PHASE = 2  # [worker] see Phase
    PHASE_SINCE_NS = 3  # [worker]
    PHASE_DEADLINE_NS = 4  # [worker] progress must come before this instant
    BEAT_NS = 5  # [worker] a side thread's: the interpreter lives
    PROGRESS = 6  # [worker] the work loop's: the work moves
    QUEUE = 7  # [worker] see pack_queue
    BATCH_LIMIT = 8  # [worker] in force now
    SERVICE_NS = 9  # [worker] smoothed time per sample, 0 until known
    BATCHES = 10  # [worker]
    SAMPLES = 11  # [worker]
    LAST_ERROR = 12  # [worker] see worker faults; 0 none
    RUNNING_TICKETS = 13  # [worker] how many tickets of the ticket area are the running batch
    ROUTER_EPOCH = 14  # [worker] the router it is registered with
    MEMORY_BYTES = 15  # [worker] resident memory of the process
    WINDOW_NS = 16  # [worker] in force now
    FULL_ROW_NS = 17  # [worker] time per sample in full batches, by the fit; 0 until that is good
    SET_BATCH_PPM = 24  # [supervisor] share of the batch limit, in millionths; 0: all of it
    SET_WINDOW_PPM = 25  # [supervisor] share of the configured window, in millionths; 0: all of it
    SET_LOG_LEVEL = 26  # [supervisor] this worker's own; 0: as LOG_LEVEL


class Phase(IntEnum):
    """What a worker is doing. Each but IDLE bears a deadline."""

    NONE = 0
    IMPORT = 1
    LOAD = 2
    WARM_UP = 3
    IDLE = 4
    BATCH = 5
    STOPPING = 6


def pack_queue(sequence: int, running: int, queued: int) -> int:
    """Put samples running and queued into one word (16-bit sequence, 24 bits each), saturating."""
    top = (1 << 24) - 1
    return (sequence & 0xFFFF) << 48 | min(running, top) << 24 | min(queued, top)


def unpack_queue(word: int) -> tuple[int, int]:
    """Return (running, queued) samples of a queue word."""
    return word >> 24 & 0xFFFFFF, word & 0xFFFFFF


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One slot's worker-written words, read at one moment (each word consistent in itself)."""

    incarnation: int
    pid: int
    phase: Phase
    phase_since_ns: int
    phase_deadline_ns: int
    beat_ns: int
    progress: int
    running: int
    queued: int
    batch_limit: int
    service_ns: int
    batches: int
    samples: int
    last_error: int
    router_epoch: int
    memory_bytes: int
    window_ns: int


class Board:
    """The mapped board. Methods named set_* belong to the one process that the word's comment names."""

    def __init__(self, fd: int, slots: int) -> None:
        self.fd = fd
        self.slots = slots
        self._map = mmap.mmap(fd, _size(slots))
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, slots: int) -> Board:
        """Make a board; its descriptor is inheritable only where it is passed on explicitly.

        Raises:
            OSError: when the kernel has no memory for it. It is allocated here, never on first touch.
        """
        if not 0 < slots <= MAX_SLOTS:
            raise ValueError(f"{slots} slots: the board holds 1 to {MAX_SLOTS}")
        fd = os.memfd_create("gpupool-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, _size(slots))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        board = cls(fd, slots)
        board._words[Word.SLOTS] = slots
        board._words[Word.LAYOUT] = LAYOUT
        board._words[Word.MAGIC] = MAGIC
        return board

    @classmethod
    def attach(cls, fd: int) -> Board:
        """Map an inherited board.

        Raises:
            ValueError: when the descriptor holds something else, or another layout.
        """
        size = os.fstat(fd).st_size
        slots = (size // 8 - HEADER_WORDS) // _STRIDE
        if slots < 1 or size != _size(slots):
            raise ValueError(f"descriptor {fd} is no board: {size} bytes")
        board = cls(fd, slots)
        if board._words[Word.MAGIC] != MAGIC or board._words[Word.SLOTS] != slots:
            raise ValueError(f"descriptor {fd} is no board: wrong magic")
        if board._words[Word.LAYOUT] != LAYOUT:
            raise ValueError(f"board layout {board._words[Word.LAYOUT]}, this program knows {LAYOUT}")
        return board

    def close(self) -> None:
        """Unmap and close; the memory goes when the last process has closed it."""
        self._words.release()
        self._map.close()
        os.close(self.fd)

    def get(self, word: Word) -> int:
        """Read a header word."""
        return self._words[word]

    def set(self, word: Word, value: int) -> None:
        """Write a header word."""
        self._words[word] = value

    def log_level(self, slot: int | None = None) -> int:
        """Return the level in force for the worker of a slot, or for the router: 10 debug … 40 error."""
        own = self._words[Word.ROUTER_LOG_LEVEL] if slot is None else self.get_slot(slot, SlotWord.SET_LOG_LEVEL)
        return own or self._words[Word.LOG_LEVEL]

    def get_slot(self, slot: int, word: SlotWord) -> int:
        """Read one word of a slot."""
        return self._words[self._at(slot) + word]

    def set_slot(self, slot: int, word: SlotWord, value: int) -> None:
        """Write one word of a slot."""
        self._words[self._at(slot) + word] = value

    def read(self, slot: int) -> SlotRecord:
        """Read what the worker of a slot last wrote. An impossible phase reads as NONE: unknown, never idle."""
        at = self._at(slot)
        w = self._words[at : at + SLOT_WORDS].tolist()
        running, queued = unpack_queue(w[SlotWord.QUEUE])
        phase = Phase(w[SlotWord.PHASE]) if w[SlotWord.PHASE] in Phase._value2member_map_ else Phase.NONE
        return SlotRecord(
            incarnation=w[SlotWord.INCARNATION], pid=w[SlotWord.PID], phase=phase, phase_since_ns=w[SlotWord.PHASE_SINCE_NS],
            phase_deadline_ns=w[SlotWord.PHASE_DEADLINE_NS], beat_ns=w[SlotWord.BEAT_NS], progress=w[SlotWord.PROGRESS],
            running=running, queued=queued, batch_limit=w[SlotWord.BATCH_LIMIT], service_ns=w[SlotWord.SERVICE_NS],
            batches=w[SlotWord.BATCHES], samples=w[SlotWord.SAMPLES], last_error=w[SlotWord.LAST_ERROR],
            router_epoch=w[SlotWord.ROUTER_EPOCH], memory_bytes=w[SlotWord.MEMORY_BYTES], window_ns=w[SlotWord.WINDOW_NS],
        )  # fmt: skip

    def claim(self, slot: int, incarnation: int, pid: int) -> None:
        """Take over a slot's record as a new worker: clear its words, the incarnation last."""
        at = self._at(slot)
        self._words[at + SlotWord.INCARNATION] = 0
        for word in range(1, SlotWord.SET_BATCH_PPM):
            self._words[at + word] = 0
        for lane in range(LANE_WORDS):
            self._words[at + SLOT_WORDS + TICKET_WORDS + lane] = 0
        self._words[at + SlotWord.PID] = pid
        self._words[at + SlotWord.INCARNATION] = incarnation

    def set_running(self, slot: int, tickets: Sequence[int]) -> None:
        """Name the batch that is about to run, so that a death can be laid at its door. Empty when it is done."""
        at = self._at(slot)
        if len(tickets) > TICKET_WORDS:
            self._words[at + SlotWord.RUNNING_TICKETS] = TICKETS_OVERFLOW
            return
        if tickets:
            first = at + SLOT_WORDS
            self._words[first : first + len(tickets)] = memoryview(array("Q", tickets))
        self._words[at + SlotWord.RUNNING_TICKETS] = len(tickets)

    def set_beside(self, slot: int, lane: int, ticket: int) -> None:
        """Name the request whose pre- or postprocessing a thread of the worker is at; 0 when that is over."""
        if not 0 <= lane < LANE_WORDS:
            raise IndexError(f"lane {lane} of {LANE_WORDS}")
        self._words[self._at(slot) + SLOT_WORDS + TICKET_WORDS + lane] = ticket

    def running(self, slot: int) -> list[int] | None:
        """Return the tickets, each once, of what the model's code had in a (dead) worker; None when they cannot be told: suspect all."""
        at = self._at(slot)
        count = self._words[at + SlotWord.RUNNING_TICKETS]
        if count > TICKET_WORDS:
            return None
        first = at + SLOT_WORDS
        tickets = self._words[first : first + count].tolist()
        lanes = self._words[first + TICKET_WORDS : first + TICKET_WORDS + LANE_WORDS].tolist()
        return list(dict.fromkeys([*tickets, *(ticket for ticket in lanes if ticket)]))

    def _at(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return HEADER_WORDS + slot * _STRIDE


def _size(slots: int) -> int:
    return 8 * (HEADER_WORDS + slots * _STRIDE)
