"""Exit codes: what the end of a process says about it (sysexits where one fits)."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the command line, of `serve` and of workers.

    A worker's code tells the supervisor whether starting it again can help: see `RESTART_CANNOT_HELP`.
    """

    OK = 0
    FAILED = 1  # the pool answered that it failed
    USAGE = 2
    UNREACHABLE = 3
    TIMEOUT = 4
    NOT_READY = 5
    DEGRADED = 6
    DEVICE_UNUSABLE = 69  # worker: its card is missing, or it sees another one than it was given
    MODEL_FAILED = 70  # worker: import, load or warm-up of a model raised
    REPLACE_ME = 75  # worker: its CUDA context is poisoned; a fresh process is fine
    ALREADY_RUNNING = 75  # serve: another pool holds this runtime directory
    PARENT_GONE = 77  # child: its supervisor died before the child could attach to it
    BAD_CONFIG = 78  # serve, check-config, worker: no restart can help, the configuration must change


#: Worker exits after which the same start would fail the same way: restarting only burns the card's time.
RESTART_CANNOT_HELP = frozenset({Exit.BAD_CONFIG})
