"""How much memory this process may use, what it uses, and what a run takes at its peak: the host's side, and a card's.

On the host the budget is the soft limit RLIMIT_DATA of this process. The other ways that were looked at:

- RLIMIT_AS counts address space: libraries, file mappings, and 64 MiB that the C library sets aside for each thread without using
  them. With torch loaded that is 780 MiB against 244 MiB by RLIMIT_DATA and 226 MiB resident (torch 2.13).
- A cgroup's memory.max does not refuse, it kills; and it takes privileges that a worker does not have.
- A model's own accounting is exact where a model has it, and protects from no other. It works beside this: MemoryError is understood.

RLIMIT_DATA counts what a process may write to for itself (VmData: heap, anonymous and private writable mappings, stacks of threads in
full), whether touched or not. A file mapped privately and writable counts although it costs nothing (torch.load(mmap=True)); shared memory does
not count although it costs. At the limit malloc and mmap return nothing: numpy and Python raise MemoryError, torch a RuntimeError
"DefaultCPUAllocator: can't allocate memory"; `faults.classify` reads all three. The limit is the process's, not the model's: for the
moment until a failed forward has been unwound, other threads are short as well. Therefore a reserve is held that is let go as soon as a
forward has failed, and taken again when it has been cleaned up.

Peaks on the host are the resident high-water mark, reset before a run: pages that were really touched. Its error is what the kernel
leaves uncounted for each CPU (some 100 KiB on two, a few MiB on 64), and memory that is allocated and never touched. On a card both are the
caching allocator's own counters, exact to its rounding (512 bytes, and blocks of 2 MiB and more that it cannot split).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

#: Room that a failed forward leaves to those who clean up after it and to the other threads meanwhile.
RESERVE_BYTES: Final = 16 << 20
#: The C library grows these by itself, to 32 and 64 MiB of free heap that counts against the limit and serves no large block. Held
#: here, a batch's large blocks come from the system and go back to it at once: some 0.1 ms of page faults for each MiB.
_MMAP_THRESHOLD: Final = 4 << 20
_TRIM_THRESHOLD: Final = 16 << 20
_M_TRIM_THRESHOLD: Final = -1  # as mallopt has them
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_STATUS: Final = Path("/proc/self/status")
_TASKS: Final = Path("/proc/self/task")
_STACK_BYTES: Final = 2 << 20  # of a thread, where nothing limits it
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = b"5"


class Budget(Protocol):
    """One device's memory, as the plan and the report see it. Sizes in bytes."""

    def limit(self) -> int | None:
        """Return what may be used in all, None: no limit is known."""

    def used(self) -> int:
        """Return what is used now, counted as the limit counts it."""

    def fixed(self) -> int:
        """Return what to count as used before any batch."""

    def at_rest(self) -> int:
        """Return what is held although nothing runs; what a new process would not hold of it is lost."""

    def peak_of(self, run: Callable[[], object]) -> int:
        """Run something and return the most that it took above what was used before. Raises what it raises."""

    def brace(self) -> None:
        """Be ready for a run that may not fit."""

    def relieve(self) -> None:
        """Make some room: a run has just failed for want of memory. Allocates nothing."""

    def recover(self) -> None:
        """Give back what the failure left."""


class NotMeasurable(Exception):
    """This system does not tell peaks; says why."""


def share_one_heap() -> None:
    """Have all threads of this process use one heap; to be called before there are threads, where a limit will be enforced.

    Otherwise each has its own, which keeps what it once took: after a forward that filled the memory piece by piece nothing is left for
    the others although nearly all of it is free. (Of six series of 100 batches that filled 300 MiB in pieces of 16 kB, beside messages of
    1 MB, four lost messages or the process before, none of six since.)
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


class HostBudget:
    """The memory of this process on the host."""

    def __init__(self) -> None:
        self._inherited = resource.getrlimit(resource.RLIMIT_DATA)[0]  # whoever set it meant us: it is never passed
        self._limit: int | None = None
        self._reserve: mmap.mmap | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._libc = ctypes.CDLL(None)

    def set_limit(self, limit_bytes: int | None) -> None:
        """Enforce a limit from now on, None: no longer. Below what is used it only refuses what comes from now on."""
        wanted = self._inherited if limit_bytes is None else limit_bytes
        if self._inherited != resource.RLIM_INFINITY:
            wanted = min(wanted, self._inherited)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        self._limit = None if wanted == resource.RLIM_INFINITY else wanted
        if self._limit is None:
            self.relieve()
            return
        with contextlib.suppress(AttributeError):  # another C library than glibc
            self._libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
            self._libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
        self.brace()

    def limit(self) -> int | None:
        """Return the limit in force."""
        return self._limit

    def total(self) -> int:
        """Return the host's memory."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def used(self) -> int:
        """Return what counts against the limit."""
        return _status("VmData")

    def fixed(self) -> int:
        """Return what counts now, and the free heap that may come to count."""
        return self.used() + (_TRIM_THRESHOLD if self._limit is not None else 0)

    def at_rest(self) -> int:
        """Return what counts against the limit after free heap was given back, but for the reserve and stacks.

        Free heap that something in use keeps from the heap's end goes on counting although it is given back: a heap in splinters serves
        small blocks, and leaves no room for large ones. Stacks of threads count in full and hold next to nothing: those that a library starts
        with its first batch are no loss.
        """
        self.trim()
        reserve = RESERVE_BYTES if self._reserve is not None else 0
        return max(0, self.used() - reserve - _stacks())

    def peak_of(self, run: Callable[[], object]) -> int:
        """Measure a run's peak by the resident high-water mark.

        Raises:
            NotMeasurable: where the mark cannot be reset.
        """
        self.trim()
        before = _status("VmRSS")
        try:
            _CLEAR_REFS.write_bytes(_RESET_PEAK)
        except OSError as e:
            raise NotMeasurable(f"{_CLEAR_REFS}: {e.strerror}") from None
        run()
        return max(0, _status("VmHWM") - before)

    def brace(self) -> None:
        """Hold the reserve, where there is a limit."""
        if self._reserve is None and self._limit is not None:
            with contextlib.suppress(OSError, MemoryError):  # next time, then
                self._reserve = mmap.mmap(-1, RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def relieve(self) -> None:
        """Let the reserve go."""
        reserve, self._reserve = self._reserve, None  # once, though a reload's thread may come at the same moment
        if reserve is not None:
            reserve.close()

    def recover(self) -> None:
        """Collect what the failure left in cycles, and give free heap back to the system."""
        self.trim()

    def trim(self) -> None:
        """Give free heap back."""
        gc.collect()
        with contextlib.suppress(AttributeError):  # another C library than glibc
            self._libc.malloc_trim(0)


class CardBudget:
    """The memory of the card that this process sees, through torch's caching allocator.

    Args:
        torch: the module.
        limit_fraction: share of the card's memory that this process may take; torch enforces it.
    """

    def __init__(self, torch: Any, limit_fraction: float) -> None:
        self._torch = torch
        self._cuda = torch.cuda
        self._limit_fraction = limit_fraction

    def limit(self) -> int | None:
        """Return the share of the card, or what others have left of it if that is less."""
        free, total = self._cuda.mem_get_info(0)
        return min(int(total * self._limit_fraction), int(free) + self.reserved())

    def used(self) -> int:
        """Return what tensors occupy; what the allocator merely caches can be used again."""
        used: int = self._cuda.memory_allocated(0)
        return used

    def fixed(self) -> int:
        """Return what tensors occupy."""
        return self.used()

    def at_rest(self) -> int:
        """Return what tensors occupy: blocks in the cache can be used again, or given back."""
        return self.used()

    def reserved(self) -> int:
        """Return what the allocator holds, in use or cached."""
        reserved: int = self._cuda.memory_reserved(0)
        return reserved

    def peak_of(self, run: Callable[[], object]) -> int:
        """Measure a run's peak by the allocator's counter."""
        self._cuda.synchronize()
        gc.collect()
        self._cuda.reset_peak_memory_stats(0)
        before = self.used()
        run()
        self._cuda.synchronize()
        return max(0, int(self._cuda.max_memory_allocated(0)) - before)

    def brace(self) -> None:
        """Nothing: the host's memory will not be short."""

    def relieve(self) -> None:
        """Nothing: the host's memory was not short."""

    def recover(self) -> None:
        """Collect what the failure left in cycles, and give cached blocks back."""
        gc.collect()
        self._cuda.empty_cache()

    def reserve(self, size_bytes: int) -> int:
        """Have the allocator take so much from the driver now, so that the steady state need not; return what it holds then.

        One block is allocated and freed into the cache, where it is split as needed (unless `max_split_size_mb` forbids that).
        """
        if size_bytes > 0:
            block = self._torch.empty(size_bytes, dtype=self._torch.uint8, device="cuda:0")
            del block
        return self.reserved()


def _stacks() -> int:
    """Return what the stacks of this process's threads take, in bytes, where they have the default size."""
    size = resource.getrlimit(resource.RLIMIT_STACK)[0]
    try:
        threads = len(list(_TASKS.iterdir()))
    except OSError:
        return 0
    return (threads - 1) * (size if size != resource.RLIM_INFINITY else _STACK_BYTES)  # the main thread's grows as it is used


def _status(name: str) -> int:
    """Read one line of /proc/self/status, in bytes; 0 where there is none."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
