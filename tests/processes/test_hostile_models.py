"""What a model says or does to its own process because a client made it: that one request's fault, and nobody else's."""

from __future__ import annotations

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


def test_a_model_that_ends_its_process_by_sigterm_is_refused_and_the_others_are_served(make_pool: MakePool) -> None:
    config = FAST.replace("restart_delays_s = [0.0, 0.5, 1.0]", "restart_delays_s = [0.0]\nmax_restarts = 100")
    pool = make_pool(MODEL, workers=2, config=config).start()
    load = Load(pool, rate=40, sample={"do": "nothing"})
    load.wait_for(20)
    with pool.client() as client:
        reply, _ = client.call({"in": "preprocess", "do": "term"}, within=60.0, timeout_ms=60_000)
        deaths = sum(w["restarts"] for w in pool.wait(lambda s: s["pool"]["workers_ready"] == 2)["workers"])
        assert client.call({"in": "preprocess", "do": "term"}, within=10.0)[0]["code"] == "poison"

    assert reply["code"] == "poison"
    assert 5 <= deaths <= 6
    assert set(load.stop()) == {"ok"}
    causes = {w["last_exit"]["cause"] for w in pool.status()["workers"] if w["last_exit"]}
    assert any("unasked" in cause for cause in causes)
