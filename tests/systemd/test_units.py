"""The units under a real systemd: start, reload, stop, a stuck supervisor, a bad file, and the fences as a worker sees them.

Not shown here: DeviceAllow= for cards, since its groups are resolved by a driver that must be loaded, and OOMPolicy=, since the box has no
memory controller.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.log_lines import check
from support.running import until
from support.systemd_service import CONFIG, GPUPOOL, UNIT, Service

pytestmark = pytest.mark.processes
TESTS = Path(__file__).parents[1]

#: Runs on the box's network: sends the samples given as JSON lines on stdin, says when, prints the replies' codes and bodies as JSON.
CLIENT = """
import json, sys
from support.running import RawClient
endpoint, model, within = sys.argv[1], sys.argv[2], float(sys.argv[3])
samples = [json.loads(line) for line in sys.stdin]
with RawClient(endpoint) as client:
    for sample in samples:
        client.send(sample, model=model, timeout_ms=60000)
    replies = []
    while len(replies) < len(samples) and (reply := client.receive(within)):
        replies.append([reply[0]["code"], reply[1]])
print(json.dumps(replies))
"""


#: Stands for the pool: takes one line from its socket.
LISTENER = """
import os, socket
os.umask(0o117)
with socket.socket(socket.AF_UNIX) as server:
    server.settimeout(20)
    server.bind("/run/gpupool/xid.sock")
    server.listen()
    print(server.accept()[0].makefile().readline())
"""
#: Stands for the reader of the kernel's log.
READER = """
import errno, json, os, socket, subprocess, time
from pathlib import Path

def attempt(action):
    try:
        action()
        return "done"
    except OSError as e:
        return errno.errorcode[e.errno]

record = subprocess.run(["journalctl", "-o", "json", "-n", "1", "_PID=1"], capture_output=True, text=True, timeout=10)
status = dict(line.split(":\\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
found = {
    "uid": os.getuid(),
    "journal": "read" if "MESSAGE" in record.stdout else record.stderr,
    "home": attempt(lambda: os.listdir("/root")),
    "device": attempt(lambda: open("/dev/other")),
    "network": attempt(lambda: socket.socket(socket.AF_INET)),
    "capabilities": status["CapBnd"],
}
with socket.socket(socket.AF_UNIX) as pool:
    for _ in range(100):
        if attempt(lambda: pool.connect("/run/gpupool/xid.sock")) == "done":
            break
        time.sleep(0.1)
    pool.sendall(json.dumps(found).encode() + b"\\n")
"""


class Client:
    """A client of the pool in the box."""

    def __init__(
        self,
        service: Service,
        samples: list[object],
        *,
        model: str = "toy",
        within: float = 20.0,
        endpoint: str = "tcp://127.0.0.1:5555",
    ) -> None:
        command = service.box.on_its_network(sys.executable, "-c", CLIENT, endpoint, model, str(within))
        self._process = subprocess.Popen(
            ["env", f"PYTHONPATH={TESTS}", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin
        self._process.stdin.write("\n".join(map(json.dumps, samples)))
        self._process.stdin.close()
        self._process.stdin = None

    def replies(self) -> list[list[object]]:
        """Code and body of each reply."""
        out, _ = self._process.communicate(timeout=60)
        replies: list[list[object]] = json.loads(out)
        return replies


def test_started_means_serving_and_the_status_text_says_so(service: Service) -> None:
    service.systemctl("start")

    assert service.systemctl("is-active").stdout.strip() == "active"
    assert service.status()["pool"]["ready"]
    service.wait("StatusText", "ready: 2/2 workers ready; pending 0")
    assert Client(service, [{"i": 1}]).replies() == [["ok", {"i": 1}]]


def test_every_line_in_the_journal_is_one_json_value(service: Service) -> None:
    service.systemctl("start")
    seen: set[str] = set()
    for _ in until(10.0, every=0.2):  # journald takes its time
        seen |= {check(e["MESSAGE"]).event for e in service.journal() if e["SYSLOG_IDENTIFIER"] == "gpupool"}
        if "pool_ready" in seen:
            break
    assert "pool_ready" in seen


def test_a_worker_finds_itself_fenced_in(service: Service) -> None:
    service.systemctl("start")

    ((code, found),) = Client(service, [{}], model="inside").replies()

    assert code == "ok"
    assert isinstance(found, dict)
    assert found["uid"] == int(service.run("id", "-u", "gpupool").stdout)
    assert {key: found["status"][key] for key in ("NoNewPrivs", "Seccomp", "CapEff", "CapBnd")} == {
        "NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0" * 16, "CapBnd": "0" * 16,
    }  # fmt: skip
    assert {key: found[key] for key in ("configuration", "code", "home", "other_device", "packets")} == {
        "configuration": "EACCES", "code": "EROFS", "home": "EACCES", "other_device": "EPERM", "packets": "EAFNOSUPPORT",
    }  # fmt: skip
    assert {found[key] for key in ("cache", "tmp", "null_device")} == {"done"}
    # With these a worker could speak for the supervisor.
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(found["environment"])


def test_a_good_reload_is_applied_and_a_bad_one_fails_visibly_while_the_pool_serves_on(service: Service) -> None:
    service.systemctl("start")
    pid = service.show("MainPID")

    service.configure(CONFIG.replace("max_batch = 8", "max_batch = 4"))
    service.systemctl("reload")
    assert service.status()["pool"]["config_generation"] == 2

    service.configure(CONFIG.replace("max_batch", "max_bach"))
    refused = service.systemctl("reload", check=False)
    assert refused.returncode == 1
    assert "failed" in refused.stderr
    assert "max_bach" in service.text()
    service.wait("SubState", "running")
    assert service.show("ActiveState") == "active"
    assert service.show("MainPID") == pid
    assert Client(service, [{"i": 1}]).replies() == [["ok", {"i": 1}]]

    service.configure(CONFIG)
    service.systemctl("reload")
    service.run("systemctl", "kill", "--kill-whom=main", "-s", "HUP", UNIT)
    for _ in until(10.0, 0.1):
        if service.status()["pool"]["config_generation"] == 4:
            break
    assert service.status()["pool"]["config_generation"] == 4
    service.wait("SubState", "running")


def test_a_supervisor_that_stands_still_is_replaced_with_all_its_workers(service: Service) -> None:
    """The time is shortened by a drop-in; all else is as installed."""
    service.drop_in("[Service]\nWatchdogSec=2s\nRestartSec=100ms\n")
    service.systemctl("start")
    old = service.show("MainPID")
    workers = {worker["pid"] for worker in service.status()["workers"]}

    service.run("kill", "-STOP", old)
    service.wait("NRestarts", "1")
    service.wait("ActiveState", "active")

    assert service.show("MainPID") != old
    assert "Watchdog timeout" in service.text()
    assert not workers & set(map(int, service.run("ps", "-e", "-o", "pid=").stdout.split()))
    assert Client(service, [{"i": 1}]).replies() == [["ok", {"i": 1}]]


def test_pings_keep_a_healthy_pool_alive_for_longer_than_the_watchdog_s_period(service: Service) -> None:
    service.drop_in("[Service]\nWatchdogSec=1s\n")
    service.systemctl("start")
    assert Client(service, [{"i": 1, "sleep": 3.0}]).replies()[0][0] == "ok"
    assert service.show("NRestarts") == "0"


def test_a_stop_under_load_loses_nothing(service: Service) -> None:
    service.systemctl("start")
    load = Client(service, [{"i": n, "sleep": 0.2} for n in range(100)])
    for _ in until(20.0, 0.05):
        if service.status()["router"]["accepted_total"] == 100:
            break

    service.systemctl("stop")

    replies = load.replies()
    assert sorted(body["i"] for code, body in replies if code == "ok" and isinstance(body, dict)) == list(range(100))
    assert (service.show("ActiveState"), service.show("Result"), service.show("ExecMainStatus")) == ("inactive", "success", "0")
    assert service.run("pgrep", "-u", "gpupool", check=False).stdout == ""


def test_a_bad_configuration_ends_with_78_and_is_not_tried_again(service: Service) -> None:
    service.configure(CONFIG.replace("max_batch", "max_bach"))

    assert service.systemctl("start", check=False).returncode == 1

    assert (service.show("ExecMainStatus"), service.show("Result")) == ("78", "exit-code")
    # Not auto-restart.
    assert (service.show("ActiveState"), service.show("SubState"), service.show("NRestarts")) == ("failed", "failed", "0")
    assert "max_bach" in service.text()


def test_a_model_that_loads_for_longer_than_the_start_may_take_is_waited_for(service: Service) -> None:
    service.drop_in("[Service]\nTimeoutStartSec=2s\n")
    slow = 'handler = "toy_models:SlowLoad"\noptions = { seconds = 5.0 }'
    service.configure(CONFIG.replace('handler = "toy_models:Sleep"', slow))

    service.systemctl("start")

    assert service.show("NRestarts") == "0"
    assert service.status()["pool"]["ready"]


def test_two_pools_run_side_by_side(service: Service) -> None:
    service.systemctl("start")
    other = CONFIG + '[router]\nbind = ["tcp://127.0.0.1:5556"]\n[http]\nbind = "127.0.0.1:9556"\n'
    service.configure(other.replace('"cpu:2"', '"cpu:1"'), "second")

    service.systemctl("start", "gpupool@second")

    assert service.show("StatusText", "gpupool@second").startswith("ready: 1/1 workers ready")
    assert service.run(GPUPOOL, "status", "--runtime-dir", "/run/gpupool-second").returncode == 0
    assert Client(service, [{"i": 1}], endpoint="tcp://127.0.0.1:5556").replies() == [["ok", {"i": 1}]]
    service.systemctl("stop", "gpupool@second")
    assert service.systemctl("is-active").stdout.strip() == "active"


def test_clients_on_the_network_are_let_in_by_the_drop_in_only(service: Service) -> None:
    """The host's own address on the client network stands for a client: the filter looks at the address a packet comes from."""
    with contextlib.suppress(AssertionError):  # it is there already
        service.run("ip", "address", "add", "192.168.10.1/32", "dev", "lo")
    address = "tcp://192.168.10.1:5557"
    service.configure(CONFIG + f'[router]\nallow_plaintext = true\nbind = ["tcp://127.0.0.1:5555", "{address}"]\n')
    service.systemctl("start")
    assert Client(service, [{"i": 1}], endpoint=address, within=1.0).replies() == []
    assert Client(service, [{"i": 1}]).replies() == [["ok", {"i": 1}]]

    service.drop_in((Path(__file__).parents[2] / "systemd" / "lan-clients.conf").read_text())
    service.systemctl("restart")

    assert Client(service, [{"i": 1}], endpoint=address).replies() == [["ok", {"i": 1}]]


def test_the_kernel_log_reader_s_fences_leave_it_the_journal_and_the_pool_s_socket(service: Service) -> None:
    """A stand-in runs in place of its program: it reads a record of the journal and sends it to the socket."""
    service.drop_in(
        "[Service]\nType=oneshot\nRestart=no\nExecStart=\nExecStart=/opt/gpupool/.venv/bin/python -P /etc/reader.py\n",
        "gpupool-xid.service",
    )
    service.box.write("/etc/reader.py", READER)
    service.systemctl("start")
    service.run("systemctl", "start", "--no-block", "gpupool-xid")

    as_the_pool = ("setpriv", "--reuid=gpupool", "--regid=gpupool", "--clear-groups")
    found = json.loads(service.run(*as_the_pool, "/usr/bin/python3", "-c", LISTENER).stdout)

    assert found.pop("uid") == int(service.run("id", "-u", "gpupool-xid").stdout)
    assert found == {
        "journal": "read", "home": "EACCES", "device": "ENOENT", "network": "EAFNOSUPPORT", "capabilities": "0" * 16,
    }  # fmt: skip
