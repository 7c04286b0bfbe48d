"""`gpupool top`, the command: the screen is imported only where it is wanted, for that takes a while."""

from __future__ import annotations

from .options import RuntimeDirOption, runtime_of


def top(runtime_dir: RuntimeDirOption = None) -> int:
    """Watch the pool live: workers, cards, queues, rates and events; keys drain, resume and restart the chosen worker."""
    from .top_screen import run  # late: textual

    return run(runtime_of(runtime_dir))
