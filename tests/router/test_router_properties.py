"""Random schedules of everything that can happen to a router: whatever the order, the promises hold after every step."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpupool import wire
from gpupool.link import Hello, WorkFlag
from gpupool.router.requests import State
from gpupool.router.tenants import Tenant
from support.router_world import TOKEN, RouterWorld

CLIENTS = (b"one", b"two", b"three")
SLOTS = 3
MAX_ATTEMPTS = 2
MAX_PENDING = 8


class RouterMachine(RuleBasedStateMachine):
    """Clients that ask and cancel, workers that answer, leave and die, a supervisor that holds and drains, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.world = RouterWorld(max_pending=MAX_PENDING, max_attempts=MAX_ATTEMPTS)
        self.asked = 0
        self.alive: dict[int, int] = {}  # incarnation by slot
        self.next = Counter[int]()
        self.held: set[int] = set()
        self.leaving: set[int] = set()
        self.seen_work = 0
        self.deadline: dict[str, float] = {}
        self.began: Counter[str] = Counter()  # executions that workers began
        self.no_retry: set[str] = set()

    def chosen(self, index: int) -> int:
        """One of the slots that are alive."""
        return sorted(self.alive)[index % len(self.alive)]

    def peer(self, slot: int) -> bytes:
        return f"w{slot}.{self.alive[slot]}".encode()

    def look(self) -> None:
        """End a turn and judge what was sent in it."""
        world = self.world
        world.step()
        for peer, requests in world.sent[self.seen_work :]:
            slot = int(peer[1:2])
            assert slot in self.alive, "work for a dead worker"
            assert peer == self.peer(slot), "work for a dead incarnation"
            assert slot not in self.leaving, "work for a worker that has left"
            if slot in self.held:
                assert set(self.alive) - self.leaving <= self.held, "work for a held worker while another one is free"
            for request in requests:
                assert self.deadline[str(request.id)] > world.now, "work past its deadline"
                elsewhere = [p for p, tickets in world.held.items() if p != peer and request in tickets.values()]
                assert not elsewhere, "one request at two workers"
                assert list(world.held[peer].values()).count(request) <= 1
                if request.deaths:
                    assert request.flags & WorkFlag.ALONE
        self.seen_work = len(world.sent)
        for tickets in world.held.values():
            alone = [r for r in tickets.values() if r.flags & WorkFlag.ALONE and r.deaths]
            assert not alone or len(tickets) == 1, "a suspect in company"

    @initialize(workers=st.integers(1, SLOTS))
    def begin(self, workers: int) -> None:
        self.world.core.workers.expect(0, 1)
        for slot in range(workers):
            self.join(slot)

    @rule(slot=st.integers(0, SLOTS - 1))
    def join(self, slot: int) -> None:
        if slot in self.alive:
            return
        self.next[slot] += 1
        self.alive[slot] = self.next[slot]
        hello = Hello(slot, self.alive[slot], 1, TOKEN, 2)
        self.world.core.workers.hello(self.peer(slot), hello, self.world.now)
        self.look()

    @rule(
        count=st.integers(1, 8), timeout_ms=st.sampled_from([50, 1000, 60_000]), priority=st.integers(0, 9), retry=st.booleans(),
    )  # fmt: skip
    def ask(self, count: int, timeout_ms: int, priority: int, retry: bool) -> None:
        for _ in range(count):
            self.asked += 1
            name = f"r{self.asked}"
            self.deadline[name] = self.world.now + timeout_ms / 1e3
            if not retry:
                self.no_retry.add(name)
            body = name.encode()
            client = CLIENTS[self.asked % 7 % 3]  # one asks more than the others
            self.world.ask(name, client=client, body=body, step=False, timeout_ms=timeout_ms, priority=priority, retry=retry)
        self.look()

    @rule(count=st.integers(1, 8))
    def ask_patiently(self, count: int) -> None:
        self.ask(count, 60_000, 5, retry=True)

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 5))
    def crash(self, index: int) -> None:
        self.lose(index, 2, blame=True, back=True)

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 5))
    def answer_well(self, index: int) -> None:
        self.answer(index, 4, "ok")

    @precondition(lambda self: self.world.core.ledger.open)
    @rule(index=st.integers(0, 30))
    def cancel(self, index: int) -> None:
        open_now = self.world.core.ledger.all_open()
        chosen = open_now[index % len(open_now)]
        client, name = chosen.client, str(chosen.id)
        self.world.message([wire.pack_request({"type": "cancel", "id": name})], client=client, step=False)
        self.look()
        assert self.world.codes(name, client) == ["cancelled"]

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 5), count=st.integers(1, 4), code=st.sampled_from(["ok", "ok", "model_error", "internal"]))
    def answer(self, index: int, count: int, code: str) -> None:
        peer = self.peer(self.chosen(index))
        tickets = self.world.tickets(peer)[:count]
        self.began.update(str(self.world.held[peer][t].id) for t in tickets)
        self.world.answer(peer, tickets, code=code, batch_size=count, forward_s=0.01)
        self.look()

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 5), running=st.sampled_from([0, 2, None]), blame=st.booleans(), back=st.booleans())
    def lose(self, index: int, running: int | None, blame: bool, back: bool) -> None:
        slot = self.chosen(index)
        peer = self.peer(slot)
        tickets = self.world.tickets(peer)
        mine = None if running is None else tickets[:running]
        self.began.update(str(self.world.held[peer][t].id) for t in (tickets if mine is None else mine))
        incarnation = self.alive.pop(slot)
        self.leaving.discard(slot)
        self.world.lose(slot, incarnation, mine, blame=blame)
        self.look()
        if back:
            self.join(slot)

    @precondition(lambda self: set(self.alive) - self.leaving)
    @rule(index=st.integers(0, 5), keep=st.integers(0, 2))
    def leave(self, index: int, keep: int) -> None:
        slot = self.chosen(index)
        if slot in self.leaving:
            return
        peer = self.peer(slot)
        back = self.world.tickets(peer)[keep:]
        for ticket in back:
            del self.world.held[peer][ticket]
        self.leaving.add(slot)
        self.world.core.workers.bye(peer, back, self.world.now)
        self.look()

    @rule(slot=st.integers(0, SLOTS - 1), hold=st.sampled_from([True, False, False]))
    def hold(self, slot: int, hold: bool) -> None:
        workers = self.world.core.workers
        (workers.hold if hold else workers.release)(slot)
        (self.held.add if hold else self.held.discard)(slot)
        self.look()

    @rule(ready=st.integers(0, 1), coming=st.integers(0, 2))
    def expect(self, ready: int, coming: int) -> None:
        self.world.core.workers.expect(ready, coming)
        self.look()

    @rule(drain=st.sampled_from([True, False, False, False]))
    def drain(self, drain: bool) -> None:
        (self.world.core.drain if drain else self.world.core.undrain)()
        self.look()

    @rule(seconds=st.floats(0.001, 2.0))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)
        self.look()

    @rule(seconds=st.floats(0.001, 2.0))
    def be_late(self, seconds: float) -> None:
        """Time passes and nobody looks at deadlines before the next event."""
        self.world.now += seconds

    @precondition(lambda self: self.world.core.ledger.open)
    @rule()
    def ask_again_under_an_open_id(self) -> None:
        chosen = self.world.core.ledger.all_open()[0]
        client, name = chosen.client, chosen.id
        self.world.ask(name, client=client, step=False)
        self.look()
        assert self.world.replies[client, name].pop(0)["code"] == "bad_request"

    @invariant()
    def promises(self) -> None:
        world = self.world
        world.check()
        assert world.core.ledger.pending <= MAX_PENDING
        for (_, name), replies in world.replies.items():
            assert len(replies) <= 1, f"{name} answered {len(replies)} times"
            if replies:
                assert replies[0].get("attempts", 0) <= MAX_ATTEMPTS
        answered = {name for (_, name), replies in world.replies.items() if replies}
        still_open = {request.id for request in world.core.ledger.all_open()}
        assert not answered & still_open
        assert len(answered) + len(still_open) == self.asked
        for name, count in self.began.items():
            assert count <= MAX_ATTEMPTS
            assert count <= 1 or name not in self.no_retry, f"{name} ran twice"
        for request in world.core.ledger.all_open():
            assert request.state is not State.DONE
        outstanding = Counter[Tenant]()
        for worker in world.core.workers.fleet.by_slot.values():
            assert worker.rows == len(worker.outstanding) == sum(worker.with_priority)
            assert worker.passing == sum(1 for r in worker.outstanding.values() if r.flags & WorkFlag.URGENT)
            assert worker.passing or not worker.passing_ends
            outstanding.update(r.tenant for r in worker.outstanding.values())
        waiting = Counter(r.tenant for r in world.core.ledger.backlog)
        for tenant in world.core.connections.tenants():
            assert (tenant.pending, tenant.outstanding) == (waiting[tenant], outstanding[tenant])

    def teardown(self) -> None:
        """With all workers fresh and free, everything open comes to its end."""
        world = self.world
        for slot in range(SLOTS):
            world.core.workers.release(slot)
        self.held.clear()
        for slot in list(self.alive):
            self.leaving.discard(slot)
            world.lose(slot, self.alive.pop(slot), (), blame=False)
            self.look()
        for slot in range(SLOTS):
            self.join(slot)
        for _ in range(2 * MAX_PENDING + 4 * SLOTS):
            for slot in range(SLOTS):
                world.answer(self.peer(slot))
                self.look()
        self.promises()
        assert not world.core.ledger.open, "a request was forgotten"
        world.core.stop(world.now)
        world.step()
        assert world.quit


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
