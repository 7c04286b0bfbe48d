"""Replies kept for slow clients."""

from __future__ import annotations

from gpupool.router.outbox import Frames, Outbox, Sent


class Peers:
    """What a send finds: each client is OK, BUSY or GONE."""

    def __init__(self, **state: Sent) -> None:
        self.state = state
        self.got: list[Frames] = []

    def send(self, frames: Frames) -> Sent:
        sent = self.state[frames[0].decode()]
        if sent is Sent.OK:
            self.got.append(frames)
        return sent


def test_replies_go_out_in_order_once_the_client_reads_again() -> None:
    outbox, peers = Outbox(), Peers(a=Sent.BUSY)
    for i in range(3):
        assert outbox.add([b"a", b"%d" % i], 0.0)

    assert outbox.flush(peers.send, 1.0) == 0
    assert len(outbox) == 3
    peers.state["a"] = Sent.OK
    assert outbox.flush(peers.send, 1.1) == 0

    assert [f[1] for f in peers.got] == [b"0", b"1", b"2"]
    assert not outbox
    assert b"a" not in outbox


def test_old_reply_is_given_up() -> None:
    outbox, peers = Outbox(max_age_s=5.0), Peers(a=Sent.BUSY)
    outbox.add([b"a", b"old"], 0.0)
    outbox.add([b"a", b"new"], 4.0)

    assert outbox.flush(peers.send, 5.0) == 1
    assert len(outbox) == 1


def test_replies_to_a_client_that_left_are_given_up_at_once() -> None:
    outbox, peers = Outbox(), Peers(a=Sent.GONE, b=Sent.BUSY)
    for client in (b"a", b"a", b"b"):
        outbox.add([client, b"x"], 0.0)

    assert outbox.flush(peers.send, 0.1) == 2
    assert b"b" in outbox


def test_one_client_cannot_hoard() -> None:
    outbox = Outbox(max_client_bytes=2000)

    taken = sum(outbox.add([b"a", b"x" * 100], 0.0) for _ in range(100))

    assert 1 < taken < 10
    assert outbox.add([b"b", b"x" * 5000], 0.0)  # one is always taken, whatever its size


def test_all_clients_together_are_bounded() -> None:
    outbox = Outbox(max_bytes=10_000)
    for client in range(10):
        outbox.add([b"%d" % client, b""], 0.0)

    taken = sum(outbox.add([b"%d" % (i % 10), b""], 0.0) for i in range(1000))

    assert taken < 20


def test_room_comes_back_when_replies_leave() -> None:
    outbox, peers = Outbox(max_client_bytes=1500), Peers(a=Sent.OK)
    while outbox.add([b"a", b"x"], 0.0):
        pass

    outbox.flush(peers.send, 0.1)

    assert outbox.add([b"a", b"x"], 0.2)
    assert outbox.add([b"a", b"x"], 0.2)


def test_replies_to_a_client_that_is_gone_are_dropped_also_while_they_are_offered() -> None:
    outbox, peers = Outbox(), Peers(a=Sent.OK, b=Sent.OK)
    for i in range(3):
        assert outbox.add([b"a", b"%d" % i], 0.0)
    assert outbox.add([b"b", b"0"], 0.0)
    dropped = []

    def send(frames: Frames) -> Sent:
        if frames[0] == b"a":
            dropped.append(outbox.drop(b"a"))
        return peers.send(frames)

    assert outbox.flush(send, 1.0) == 0
    assert dropped == [3]
    assert not outbox
    assert outbox.drop(b"a") == 0


def test_another_client_that_is_gone_meanwhile_costs_the_others_nothing() -> None:
    outbox, peers = Outbox(), Peers(a=Sent.OK, b=Sent.OK, c=Sent.OK)
    for client in (b"a", b"b", b"c"):
        outbox.add([client, b"x"], 0.0)

    def send(frames: Frames) -> Sent:
        outbox.drop(b"b")  # looking whether one connection is open tells of others that have ended
        return peers.send(frames)

    assert outbox.flush(send, 1.0) == 0
    assert [f[0] for f in peers.got] == [b"a", b"c"]
    assert not outbox
