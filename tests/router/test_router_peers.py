"""Which connection a routing id belongs to, and whose messages are taken."""

from __future__ import annotations

import pytest

from gpupool.router.peers import SILENT_S, Peers

ALICE, BOB = "A" * 40, "B" * 40


def connect(peers: Peers, fd: int, key: str = "", now: float = 0.0) -> str:
    """A connection comes as far as its handshake; returns its pass."""
    peers.accepted(fd, now)
    given = peers.admit(key)
    assert given is not None
    return given


def test_first_message_binds_the_routing_id_and_later_ones_need_no_look() -> None:
    peers = Peers()
    given = connect(peers, 20)

    assert peers.arrived(b"\0a", 20, given)
    assert peers.known == {b"\0a"}
    peers.ended(20)
    assert (peers.known, peers.gone) == (set(), [b"\0a"])
    assert peers.stats(0.0)["connections"] == 0


def test_leftovers_of_an_ended_connection_are_not_taken() -> None:
    peers = Peers()
    given = connect(peers, 20)
    peers.ended(20)

    assert not peers.arrived(b"\0a", 20, given)
    assert not peers.known
    assert not peers.gone
    assert peers.dropped == 1


@pytest.mark.parametrize("speaks_first", ["the old one", "the new one"])
def test_leftovers_are_told_from_the_descriptors_next_connection(speaks_first: str) -> None:
    """Which has the same descriptor and may be silent yet, so that nothing but its pass tells the two apart."""
    peers = Peers()
    old = connect(peers, 20)
    peers.ended(20)
    new = connect(peers, 20)

    if speaks_first == "the new one":
        assert peers.arrived(b"\0b", 20, new)
    assert not peers.arrived(b"\0a", 20, old)
    assert peers.arrived(b"\0b", 20, new)
    assert peers.known == {b"\0b"}
    assert not peers.gone


def test_connection_whose_end_was_not_told_ends_with_its_descriptors_next_one() -> None:
    peers = Peers()
    assert peers.arrived(b"\0a", 20, connect(peers, 20))

    assert peers.arrived(b"\0b", 20, connect(peers, 20))
    assert (peers.known, peers.gone) == ({b"\0b"}, [b"\0a"])


@pytest.mark.parametrize("given", ["", "x", "-1 ", "0 ", "None"])
def test_message_without_a_pass_is_not_taken(given: str) -> None:
    peers = Peers()
    connect(peers, 20)

    assert not peers.arrived(b"\0a", 20, given)
    assert not peers.known


def test_second_routing_id_over_one_connection_is_not_taken() -> None:
    peers = Peers()
    given = connect(peers, 20)
    assert peers.arrived(b"\0a", 20, given)

    assert not peers.arrived(b"\0b", 20, given)
    assert peers.known == {b"\0a"}


def test_silent_connections_cost_one_entry_each_and_are_counted() -> None:
    peers = Peers()
    for fd in range(500):
        connect(peers, fd, now=10.0)
    assert peers.arrived(b"\0a", 0, "1 ")

    assert peers.stats(10.0 + SILENT_S - 1)["silent_connections"] == 0
    assert peers.stats(10.0 + SILENT_S)["silent_connections"] == 499
    for fd in range(500):
        peers.ended(fd)
    assert peers.stats(99.0)["connections"] == 0
    assert peers.gone == [b"\0a"]


def test_only_an_authorised_key_gets_a_pass_and_its_client_is_named() -> None:
    peers = Peers({ALICE: "alice"})
    peers.accepted(20, 0.0)

    assert peers.admit(BOB) is None
    assert peers.admit("") is None
    assert peers.arrived(b"\0a", 20, connect(peers, 20, ALICE))
    assert peers.named == [(b"\0a", "alice")]


def test_removed_key_shuts_its_open_connections_out_and_nobody_else() -> None:
    peers = Peers({ALICE: "alice", BOB: "bob"})
    alice, bob = connect(peers, 20, ALICE), connect(peers, 21, BOB)
    assert peers.arrived(b"\0a", 20, alice)
    assert peers.arrived(b"\0b", 21, bob)

    peers.rekeyed({BOB: "bob"})
    assert peers.gone == [b"\0a"]
    assert not peers.arrived(b"\0a", 20, alice)
    assert peers.arrived(b"\0b", 21, bob)
    assert (peers.known, peers.dropped) == ({b"\0b"}, 1)
    assert peers.key_of(b"\0a") == ALICE

    peers.rekeyed({ALICE: "alice", BOB: "bob"})
    assert peers.arrived(b"\0a", 20, alice)
    assert peers.named == [(b"\0a", "alice"), (b"\0b", "bob"), (b"\0a", "alice")]  # the core has forgotten it meanwhile


def test_key_removed_between_handshake_and_first_message_is_shut_out() -> None:
    peers = Peers({ALICE: "alice"})
    alice = connect(peers, 20, ALICE)

    peers.rekeyed({})
    assert not peers.arrived(b"\0a", 20, alice)
    assert not peers.named


def test_key_file_under_another_name_names_its_clients_anew() -> None:
    peers = Peers({ALICE: "alice"})
    alice = connect(peers, 20, ALICE)
    assert peers.arrived(b"\0a", 20, alice)

    peers.rekeyed({ALICE: "alicia"})
    assert not peers.gone
    assert peers.arrived(b"\0a", 20, alice)
    assert peers.named == [(b"\0a", "alice"), (b"\0a", "alicia")]


def test_chosen_routing_ids_are_told_from_libzmqs_own() -> None:
    peers = Peers()
    assert peers.arrived(b"\0a", 20, connect(peers, 20))
    assert not peers.has_chosen_ids()

    assert peers.arrived(b"app1", 21, connect(peers, 21))
    assert peers.has_chosen_ids()
