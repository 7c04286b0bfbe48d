"""Who is in the models' preprocess, and who is to be alone there: the deciding core, without lock or thread.

A sample that did not fit into memory while other threads had theirs there proves nothing; it is tried once more while nobody else has.
Nobody enters while somebody waits for that, so those inside are soon out, and who waits is bounded by the number of threads: each
waits outside, one after the other has its turn, and then all go on.
"""

from __future__ import annotations


class Solitude:
    """Counts threads. A thread is outside, inside with others, waiting (which is outside), or alone inside."""

    def __init__(self) -> None:
        self._inside = 0
        self._waiting = 0
        self._alone = False

    @property
    def open(self) -> bool:
        """Whether a thread may enter, or begin another row."""
        return not self._waiting and not self._alone

    @property
    def vacant(self) -> bool:
        """Whether one that waits may begin: nobody is inside."""
        return not self._inside

    def enter(self) -> None:
        """Go inside, where that is open."""
        assert self.open
        self._inside += 1

    def leave(self) -> None:
        """Go outside, also after having been alone."""
        self._inside -= 1
        self._alone = False

    def want(self) -> None:
        """Go outside and wait there for one's turn alone."""
        self.leave()
        self._waiting += 1

    def begin(self) -> None:
        """Go inside alone, after a wait, where that is vacant."""
        assert self.vacant
        self._waiting -= 1
        self._inside += 1
        self._alone = True

    def forgo(self) -> None:
        """Wait no longer, and stay outside."""
        self._waiting -= 1
