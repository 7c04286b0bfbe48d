"""What a model says or does to its own process because a client made it: that one request's fault, and nobody else's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from support.running import FAST, Load, RunningPool

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]
MODEL = "hostile_model:Hostile"


def test_text_that_is_no_utf8_is_answered_in_every_stage_and_ends_nobody(make_pool: MakePool) -> None:
    pool = make_pool(MODEL, workers=2, config=FAST).start()
    with pool.client() as client:
        asked = {
            client.send({"in": stage, "do": do, "text": '"\\ud800"'}): (stage, do)
            for stage in ("preprocess", "length", "forward", "postprocess")
            for do in ("text", "field")
        }
        asked |= {
            client.send({"in": stage, "do": do, "text": '"\\ud800"'}): (stage, do)
            for stage in ("forward", "postprocess")
            for do in ("value", "key")
        }
        replies = client.collect(len(asked))

    codes = {what: replies[number][0]["code"] for number, what in asked.items()}
    assert codes == {what: "invalid_input" if what[1] == "field" else "model_error" for what in codes}
    assert {replies[n][0].get("field") for n, what in asked.items() if what[1] == "field"} == {"?"}
    assert [w["restarts"] for w in pool.status()["workers"]] == [0, 0]


@pytest.mark.parametrize("stage", ["length", "preprocess"])
def test_a_model_that_ends_its_process_by_sigterm_is_refused_and_the_others_are_served(make_pool: MakePool, stage: str) -> None:
    """It does not leave while the model has the request, is killed for that, and the board names whose fault it was."""
    config = FAST.replace("restart_delays_s = [0.0, 0.5, 1.0]", "restart_delays_s = [0.0]\nmax_restarts = 100")
    pool = make_pool(MODEL, workers=2, config=config).start()
    load = Load(pool, rate=40, sample={"do": "nothing"})
    load.wait_for(20)
    with pool.client() as client:
        reply, _ = client.call({"in": stage, "do": "term"}, within=60.0, timeout_ms=60_000)
        deaths = sum(w["restarts"] for w in pool.wait(lambda s: s["pool"]["workers_ready"] == 2)["workers"])
        assert client.call({"in": stage, "do": "term"}, within=10.0)[0]["code"] == "poison"

    assert reply["code"] == "poison"
    assert 2 <= deaths <= 3
    assert set(load.stop()) == {"ok"}


def test_a_worker_that_leaves_unasked_says_so_and_comes_back(make_pool: MakePool) -> None:
    pool = make_pool(MODEL, workers=2, config=FAST).start()
    os.kill(pool.status()["workers"][0]["pid"], signal.SIGTERM)
    status = pool.wait(lambda s: s["workers"][0]["incarnation"] > 1 and s["pool"]["workers_ready"] == 2)
    assert "unasked" in status["workers"][0]["last_exit"]["cause"]
