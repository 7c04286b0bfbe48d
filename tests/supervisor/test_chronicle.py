"""Nobody who logs waits for the journal, not even a finalizer that runs while the journal is at work."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from gpupool.logs import Log
from gpupool.spec import LogSpec
from gpupool.supervisor.chronicle import Chronicle


def test_a_finalizer_that_logs_while_a_record_is_kept_hangs_nothing_and_is_kept(tmp_path: Path) -> None:
    fd = os.open("/dev/null", os.O_WRONLY)
    log = Log("supervisor", LogSpec(fd=fd))
    chronicle = Chronicle(log, tmp_path / "p.events.jsonl", tmp_path, ["cpu:0"])

    class Odd:
        def __str__(self) -> str:  # called within, where the journal makes the record's line
            log.event.info("in_between")
            return "odd"

    thread = threading.Thread(target=lambda: log.event.info("outer", odd=Odd()), daemon=True)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive(), "hangs"
    assert [e["event"] for e in chronicle.answer({})["events"]] == ["outer", "in_between"]
    chronicle.close()
    log.close()
    os.close(fd)
