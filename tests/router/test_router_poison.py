"""The table of refused content."""

from __future__ import annotations

from gpupool.router.poison import CONTENT_DEATHS, CONTENT_S, Poison


def test_content_is_refused_for_its_time_and_no_longer() -> None:
    poison = Poison(ttl_s=10.0)

    poison.add(0, [b"evil"], 100.0)

    assert poison.holds(0, [b"evil"], 109.9)
    assert not poison.holds(0, [b"evil"], 110.0)
    assert len(poison) == 0


def test_other_content_model_or_framing_is_another_request() -> None:
    poison = Poison()

    poison.add(0, [b"ab", b"c"], 0.0)

    assert not poison.holds(0, [b"ab", b"d"], 1.0)
    assert not poison.holds(1, [b"ab", b"c"], 1.0)
    assert not poison.holds(0, [b"a", b"bc"], 1.0)
    assert not poison.holds(0, [b"abc"], 1.0)
    assert poison.holds(0, [b"ab", b"c"], 1.0)


def test_full_table_forgets_the_oldest() -> None:
    poison = Poison(max_entries=3)

    for i in range(5):
        poison.add(0, [b"%d" % i], float(i))

    assert len(poison) == 3
    assert [poison.holds(0, [b"%d" % i], 5.0) is not None for i in range(5)] == [False, False, True, True, True]


def test_second_offence_counts_from_then() -> None:
    poison = Poison(ttl_s=10.0)

    poison.add(0, [b"x"], 0.0)
    poison.add(0, [b"x"], 8.0)

    assert len(poison) == 1
    assert poison.holds(0, [b"x"], 15.0)
    assert not poison.holds(0, [b"x"], 18.0)
    assert not poison._shapes


def test_a_content_of_which_each_request_kills_one_is_known_at_the_third_death() -> None:
    poison = Poison()

    assert [poison.death(0, [b"x"], float(t)) for t in range(3)] == [1, 2, CONTENT_DEATHS]
    assert poison.death(0, [b"y"], 3.0) == 1


def test_deaths_long_ago_count_no_more() -> None:
    poison = Poison()
    poison.death(0, [b"x"], 0.0)
    poison.death(0, [b"x"], 1.0)

    assert poison.death(0, [b"x"], CONTENT_S + 0.5) == 2


def test_what_a_worker_survives_is_suspected_no_more() -> None:
    poison = Poison()
    poison.death(0, [b"x"], 0.0)
    poison.death(0, [b"x"], 1.0)
    poison.survived(0, [b"other"], 2.0)
    poison.survived(0, [b"x"], 2.001)  # looked at now and then only
    poison.survived(0, [b"x"], 3.0)

    assert not poison.suspects
    assert poison.death(0, [b"x"], 4.0) == 1


def test_suspected_contents_are_bounded() -> None:
    poison = Poison(max_entries=3)
    for i in range(10):
        poison.death(0, [b"%d" % i], 0.0)

    assert len(poison._deaths) == 3
