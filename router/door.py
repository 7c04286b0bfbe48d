"""The clients' front door: CURVE, who is let in, and what libzmq tells of connections that come and go.

Every handshake, plaintext too, is asked about (ZAP, RFC 27), and whoever is let in gets a pass that its messages carry as their User-Id;
`peers` says what for. Answered by hand, in thirty lines, and not by pyzmq's Authenticator: that one hands out no passes for plaintext,
and its decision is a coroutine. A handshake is answered only when the clients' socket has been read to its end: then libzmq has let go
of the routing ids of all connections that had ended by then, and a client that restarts under its own gets it. (Otherwise libzmq would
ignore it for good. Hand-over, which would give it the id at once, would also give anybody the replies of a client whose id he states.)

The monitor's queue holds some 11,000 reports; when it is full libzmq's own thread waits, and connections with it, until we have read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils import z85

from gpupool.keys import KeyFileError, read_secret
from gpupool.logs import Log
from gpupool.spec import CurveSpec

from .keyring import Keyring, Keys, watch
from .peers import Peers

_MONITOR: Final = "inproc://clients.monitor"
_ZAP: Final = "inproc://zeromq.zap.01"
_DOMAIN: Final = b"gpupool"
_VERSION: Final = b"1.0"
#: How many reports wait for us besides the 1000 that libzmq keeps on its own side.
_REPORTS: Final = 10_000
#: More than may wait, so that a look that is to be complete is.
_ALL_REPORTS: Final = 2 * _REPORTS
_REPORTS_PER_TURN: Final = 1000
_ANSWERS_PER_TURN: Final = 32
#: A handshake waits no longer for the clients' socket to be read to its end. Their own limit is 10 s.
_PATIENCE_S: Final = 0.5
_TELL_EVERY_S: Final = 1.0
_SUSPECT_EVERY_S: Final = 600.0

_REFUSED: Final = int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH)
_ACCEPTED: Final = int(zmq.Event.ACCEPTED)
_DISCONNECTED: Final = int(zmq.Event.DISCONNECTED)

Ctx = zmq.Context[zmq.Socket[bytes]]


class Door:
    """What stands between the clients' socket and the core.

    Args:
        context: the router's.
        curve: where the keys are; None: plaintext.
        log: for what an engineer should know.
        gone: told the routing id of each client whose connection has ended, or whose key was removed.
        named: told routing id and name of each client that has a key, at its first message.

    Raises:
        KeyFileError: when the pool's secret key is of no use. A folder of clients' keys that is of none authorises nobody.
    """

    def __init__(
        self,
        context: Ctx,
        curve: CurveSpec | None,
        log: Log,
        *,
        gone: Callable[[bytes], object],
        named: Callable[[bytes, str], object],
    ) -> None:
        self._log = log
        self._gone = gone
        self._named = named
        self._secret = b""
        self._public = ""
        self._keyring: Keyring | None = None
        self._keys = Keys()
        self._end_watch: Callable[[], None] = lambda: None
        if curve is not None:
            self._secret = _secret(curve.secret_key_file)
            self._public = zmq.curve_public(self._secret).decode()
            self._keyring = Keyring(Path(curve.authorized_keys_dir))
            self._keys = self._keyring.look()
        self.peers = Peers(self._keys.names if curve is not None else None)
        self._told: set[str] = set()  # removed keys that went on talking and were told of
        self._unknown_keys = 0
        self._unknown_told_at = 0.0
        self._suspects_told_at = 0.0
        self._request: list[bytes] | None = None  # a handshake that waits for its answer
        self._asked_at: float | None = None  # since when somebody has been waiting without a break
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, _REPORTS)

    @property
    def fds(self) -> tuple[int, int]:
        """What becomes readable when somebody knocks, and when a connection comes or goes."""
        return int(self._zap.get(zmq.FD)), int(self._monitor.get(zmq.FD))

    def attach(self, sock: zmq.Socket[bytes]) -> None:
        """Guard a socket; to be called before it is bound."""
        sock.set(zmq.ZAP_DOMAIN, _DOMAIN)
        sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody comes in unless we say so
        if self._secret:
            sock.set(zmq.CURVE_SECRETKEY, self._secret)
            sock.set(zmq.CURVE_SERVER, 1)
        sock.monitor(_MONITOR, _ACCEPTED | _DISCONNECTED | _REFUSED)
        self._monitor.connect(_MONITOR)

    def watch_keys(self, call_soon: Callable[[Callable[[Keys], object], Keys], object]) -> None:
        """From now on notice keys that come and go; `call_soon` brings the news to the loop's own thread."""
        if self._keyring is not None:
            self._tell_problems(Keys(), self._keys)
            self._log.event.info("client_keys", names=sorted(self._keys.names.values())[:100], total=len(self._keys.names))
            self._end_watch = watch(self._keyring, self._keys, lambda keys: call_soon(self._rekey, keys))

    # Connections

    def watch(self, limit: int = _REPORTS_PER_TURN) -> bool:
        """Take in what the monitor reports, and pass on what follows; True when a bound ended it and more may wait."""
        receive, peers, more = self._monitor.recv_multipart, self.peers, True
        now = time.monotonic()
        for _ in range(limit):
            try:
                report, _ = receive(zmq.NOBLOCK)
            except zmq.Again:
                more = False
                break
            event, value = int.from_bytes(report[:2], "little"), int.from_bytes(report[2:], "little", signed=True)
            if event == _ACCEPTED:
                peers.accepted(value, now)
            elif event == _DISCONNECTED:
                peers.ended(value)
            else:
                peers.refused += 1
        self._pass_on()
        return more

    def meet(self, client: bytes, frame: zmq.Frame) -> bool:
        """Whether to take a message, of which this is the first frame, from a client that is not `known`. Never raises."""
        try:
            given, fd = str(frame.get("User-Id")), int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            given, fd = "", -1
        self.watch(_ALL_REPORTS)
        taken = self.peers.arrived(client, fd, given)
        self._pass_on()
        if not taken and (key := self.peers.key_of(client)) and key not in self._told and key not in self._keys.names:
            self._told.add(key)
            self._log.event.warning("removed_key_talks", key=key, client=client[-8:].hex())
        return taken

    def is_open(self, client: bytes) -> bool:
        """Whether a client's connection had not ended a moment ago."""
        self.watch(_ALL_REPORTS)
        return self.peers.has(client)

    def look_around(self, now: float) -> None:
        """Warn of what can only be suspected: a second client under a routing id is ignored by libzmq without a word."""
        peers = self.peers
        if now >= self._suspects_told_at + _SUSPECT_EVERY_S and peers.has_chosen_ids() and (count := peers.silent(now)):
            self._suspects_told_at = now
            hint = "idle, or under a routing id that another connection has: then nothing of it arrives"
            self._log.event.warning("silent_connections", count=count, hint=hint)

    def _pass_on(self) -> None:
        peers = self.peers
        if peers.gone:
            gone, peers.gone = peers.gone, []
            for client in gone:
                self._gone(client)
        if peers.named:
            named, peers.named = peers.named, []
            for client, name in named:
                self._named(client, name)

    # Handshakes

    def answer(self, now: float, drain: Callable[[], bool]) -> bool:
        """Answer those who knock, each after the clients' socket was read to its end; True when some still wait.

        `drain` reads that socket, and returns whether more is there.
        """
        zap = self._zap
        if self._request is None and not int(zap.get(zmq.EVENTS)) & zmq.POLLIN:
            self._asked_at = None
            return False
        if self._asked_at is None:
            self._asked_at = (
                now  # one patience for all who knock one after the other: a busy socket must not make them queue for it
            )
        for _ in range(_ANSWERS_PER_TURN):
            if self._request is None:
                try:
                    self._request = zap.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    self._asked_at = None
                    return False
            self.watch(_ALL_REPORTS)
            if now < self._asked_at + _PATIENCE_S and drain():
                return True
            request, self._request = self._request, None
            zap.send_multipart(self._reply(request, now), zmq.NOBLOCK)
        return True

    def _reply(self, request: list[bytes], now: float) -> list[bytes]:
        """Decide about one handshake: [version, request id, domain, address, our routing id, mechanism, credentials …]."""
        version, number, domain, address, _, mechanism, *credentials = request
        granted = None
        if version == _VERSION and domain == _DOMAIN:
            if self._keyring is None and mechanism == b"NULL":
                granted = self.peers.admit()
            elif self._keyring is not None and mechanism == b"CURVE" and len(credentials) == 1:
                key = z85.encode(credentials[0]).decode()
                granted = self.peers.admit(key)
                if granted is None:
                    self._tell_unknown(key, address, now)
        if granted is None:
            return [_VERSION, number, b"400", b"not authorised", b"", b""]
        return [_VERSION, number, b"200", b"OK", granted.encode(), b""]

    def _tell_unknown(self, key: str, address: bytes, now: float) -> None:
        self._unknown_keys += 1
        if now >= self._unknown_told_at + _TELL_EVERY_S:
            self._unknown_told_at = now
            self._log.event.warning(
                "unknown_client_key", key=key, address=address.decode(errors="replace"), total=self._unknown_keys
            )

    # Keys

    def _rekey(self, keys: Keys) -> None:
        old, self._keys = self._keys, keys
        self._tell_problems(old, keys)
        if old.names == keys.names:
            return
        open_now = Counter(self.peers.keys())
        for key, name in old.names.items() - keys.names.items():
            self._log.event.info("client_key_removed", name=name, key=key, connections=open_now[key])
        for key, name in keys.names.items() - old.names.items():
            self._log.event.info("client_key_added", name=name, key=key)
        self._told -= keys.names.keys()
        self.peers.rekeyed(keys.names)
        self._pass_on()

    def _tell_problems(self, old: Keys, new: Keys) -> None:
        for file, problem in new.problems.items():
            if old.problems.get(file) != problem:
                self._log.event.warning("bad_client_key", file=file, problem=problem)

    # Life

    def stats(self, now: float) -> dict[str, Any]:
        """Counts for the books; the public key and the number of clients' keys where there are any."""
        stats = self.peers.stats(now)
        if self._keyring is not None:
            stats["curve"] = {
                "public_key": self._public,
                "client_keys": len(self._keys.names),
                "bad_files": len(self._keys.problems),
            }
        return stats

    def close(self, sock: zmq.Socket[bytes] | None = None) -> None:
        """Let nobody in any more."""
        self._end_watch()
        if sock is not None:
            self.watch(_ALL_REPORTS)  # so that libzmq's thread does not wait for room while we wait for it
            sock.monitor(None, 0)
        self._monitor.close(0)
        self._zap.close(0)


def _secret(path: str) -> bytes:
    try:
        return read_secret(path).encode()
    except OSError as e:
        raise KeyFileError(f"{path}: cannot be read: {e.strerror or e}") from None
