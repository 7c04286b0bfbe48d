"""The first things a child process does: tie its life to the supervisor's and take up what it inherited.

PR_SET_PDEATHSIG is bound to the thread that spawned us (the supervisor spawns from its main thread only), and it is too late when the
parent died before we asked for it: therefore the parent's pid is compared afterwards.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from dataclasses import dataclass
from typing import Final

from gpupool.board import ENV_FD as BOARD_FD
from gpupool.board import Board
from gpupool.channel import ENV_FD as CHANNEL_FD
from gpupool.channel import Channel, Message
from gpupool.exits import Exit

ENV_PARENT: Final = "GPUPOOL_PARENT_PID"
#: A descriptor of a file that the supervisor holds locked. It is kept open until this process ends and thereby tells the next
#: supervisor that the last process of the one before is really gone.
ENV_LIFE: Final = "GPUPOOL_LIFE_FD"
_PR_SET_PDEATHSIG: Final = 1
#: The spec is sent right after the spawn; a supervisor that is silent for so long will not speak again.
_SPEC_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a child received."""

    board: Board
    channel: Channel
    spec: Message


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies; exit at once if that has already happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(ENV_PARENT, "0")):
        sys.exit(Exit.PARENT_GONE)


def attach() -> Inheritance:
    """Tie this process to its supervisor and read its spec.

    The descriptors' names leave the environment, so that programs a model starts do not find them.

    Raises:
        SystemExit: PARENT_GONE when there is no supervisor (any more); USAGE when started by hand.
    """
    if CHANNEL_FD not in os.environ or BOARD_FD not in os.environ:
        print("this program is started by `gpupool serve`, not by hand", file=sys.stderr)
        sys.exit(Exit.USAGE)
    die_with_parent()
    board_fd, channel_fd = int(os.environ.pop(BOARD_FD)), int(os.environ.pop(CHANNEL_FD))
    os.set_inheritable(board_fd, False)
    if life_fd := os.environ.pop(ENV_LIFE, ""):
        os.set_inheritable(int(life_fd), False)
    channel = Channel.from_fd(channel_fd)
    if not select.select([channel], [], [], _SPEC_TIMEOUT_S)[0]:
        sys.exit(Exit.PARENT_GONE)
    try:
        spec = channel.receive()
    except EOFError:
        sys.exit(Exit.PARENT_GONE)
    if spec is None or spec.get("t") != "spec":
        sys.exit(Exit.PARENT_GONE)
    return Inheritance(Board.attach(board_fd), channel, spec)
