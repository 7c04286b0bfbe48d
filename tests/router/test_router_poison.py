"""The table of refused content."""

from __future__ import annotations

from gpupool.router.poison import Poison


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
