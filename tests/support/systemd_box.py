"""A real systemd in a throw-away box: this machine's own, as PID 1 of its own namespaces, on an overlay of this machine's root.

All programs of the machine are seen inside; what is written inside lies in memory and is gone with the box. The box has a network of
its own (lo is up) and no way out, a fresh /tmp, /run and journal, and the pool installed at /opt/gpupool as README.md says.

What it does not give: memory, task and CPU limits where the machine keeps those controllers in cgroup v1, the kernel's log, and GPUs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Where the checkout is seen inside.
SOURCES = "/mnt/gpupool"
_BOOT_S = 20.0
_INSTALL_S = 90.0
_DOWN_S = 10.0

#: In a mount namespace of its own, so that it all ends with the box. Environment: STATE, CGROUP, SRC, NAME.
_SCRIPT = r"""
set -euo pipefail
echo $$ >"$CGROUP/cgroup.procs"
mount --make-rprivate /
[ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ] || mount -t cgroup2 cgroup2 /sys/fs/cgroup
top=$STATE/top; mkdir "$top"; mount -t tmpfs -o mode=755 tmpfs "$top"; mkdir -p "$top"/{upper/opt,work,work-opt,root}

# Install at the real path, since a virtual environment cannot be moved; into the layer that the box gets, not onto this machine.
mount -t overlay overlay -o "lowerdir=/opt,upperdir=$top/upper/opt,workdir=$top/work-opt" /opt
rm -rf /opt/gpupool
/usr/bin/python3 -m venv /opt/gpupool/.venv
/opt/gpupool/.venv/bin/pip install -q --disable-pip-version-check --root-user-action=ignore -c "$SRC/constraints.txt" "$SRC"
umount /opt

root=$top/root; mount -t overlay overlay -o "lowerdir=/,upperdir=$top/upper,workdir=$top/work" "$root"
# A small boot: none of the distribution's services, timers or consoles.
rm -rf "$root"/etc/systemd/system/*.wants "$root"/etc/systemd/system/gpupool* "$root"/var/log/journal "$root"/etc/machine-id
for unit in console-getty.service getty.target systemd-logind.service systemd-udevd.service systemd-networkd.service \
    systemd-resolved.service systemd-sysctl.service systemd-remount-fs.service systemd-update-utmp.service \
    systemd-update-utmp-runlevel.service systemd-firstboot.service dev-hugepages.mount \
    $(cd /lib/systemd/system/multi-user.target.wants && ls); do
  ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
rm -f "$root"/etc/systemd/system/{dbus.service,systemd-user-sessions.service}
systemd-id128 new >"$root/etc/machine-id"
mkdir -p "$root"/etc/systemd/journald.conf.d
printf '[Journal]\nStorage=volatile\n' >"$root/etc/systemd/journald.conf.d/box.conf"
touch "$STATE/booting"
# bpf: else the manager inside cannot attach its filters, and DeviceAllow= and IPAddressDeny= are silently without effect.
exec systemd-nspawn -q -D "$root" -b -M "$NAME" --register=no --keep-unit --console=read-only --link-journal=no --private-network \
  --system-call-filter=bpf --bind-ro="$SRC:/mnt/gpupool" systemd.unit=multi-user.target systemd.show_status=no
"""


def why_not() -> str | None:
    """Why this machine cannot have a box, if so."""
    if os.geteuid() != 0:
        return "a box needs root"
    for program, package in (("systemd-nspawn", "systemd-container"), ("nsenter", "util-linux"), ("setpriv", "util-linux")):
        if not shutil.which(program):
            return f"{program} is not installed (Debian: {package})"
    if not Path("/usr/bin/python3").exists():
        return "no system Python: a sandboxed user cannot reach one that lies in a home"
    if not (cgroups := _cgroup2()):
        return "no cgroup2 file system is mounted"
    if not os.access(cgroups, os.W_OK):
        return f"{cgroups} cannot be written: inside a container without privileges?"
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, timeout=10, check=False)
    return f"no mount namespace: {tried.stderr.strip()}" if tried.returncode else None


class Box:
    """One box. `boot_s` tells how long the manager took to come up, `install_s` the installation before."""

    def __init__(self, state: Path) -> None:
        self.state = state
        cgroups = _cgroup2()
        assert cgroups
        name = f"gpupool-test-{os.getpid()}"
        self._cgroup = cgroups / name
        self._cgroup.mkdir(exist_ok=True)
        sources = state / "sources"
        # A copy: building a package leaves things in its source folder.
        kept = [p for p in ROOT.iterdir() if p.name[0] != "." and p.name not in {"build", "dist"}]
        sources.mkdir(mode=0o755)
        for path in kept:
            if path.is_dir():
                shutil.copytree(
                    path, sources / path.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
                )
            else:
                shutil.copy2(path, sources / path.name)
        self.log = state / "console.log"
        began = time.monotonic()
        with self.log.open("wb") as log:
            self._nspawn = subprocess.Popen(
                # A test run that is killed takes its box along.
                ["setpriv", "--pdeathsig", "KILL", "unshare", "-m", "bash", "-c", _SCRIPT],
                env={**os.environ, "STATE": str(state), "CGROUP": str(self._cgroup), "SRC": str(sources), "NAME": name},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait("the installation", _INSTALL_S, lambda: (state / "booting").exists())
            self.install_s, began = time.monotonic() - began, time.monotonic()
            self._wait("the boot", _BOOT_S, self._is_up)
        except BaseException:
            self.close()
            raise
        self.boot_s = time.monotonic() - began

    def run(
        self, *command: str, check: bool = True, timeout: float = 60.0, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root. With `check`, its failure fails the test and shows what it wrote."""
        done = subprocess.run(
            [*self._enter("-m", "-u", "-i", "-n", "-p", "-C"), *command],
            input=stdin, stdin=subprocess.DEVNULL if stdin is None else None, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def on_its_network(self, *command: str) -> list[str]:
        """The command line that runs a program of this machine, with this machine's files, on the box's network."""
        return [*self._enter("-n"), *command]

    def write(self, path: str, text: str) -> None:
        """Write a file inside; folders are made."""
        self.run("sh", "-c", f"mkdir -p $(dirname {path}) && cat >{path}", stdin=text)

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "-P", name, unit).stdout.strip()

    def close(self) -> None:
        """Shut down; then kill and remove whatever is left."""
        if self._nspawn.poll() is None:
            if leader := self._leader():
                os.kill(leader, signal.SIGRTMIN + 4)  # systemd's "power off"
            try:
                self._nspawn.wait(_DOWN_S if leader else 0.0)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
        if (killer := self._cgroup / "cgroup.kill").exists():
            killer.write_text("1")
        self._nspawn.wait(_DOWN_S)
        end = time.monotonic() + _DOWN_S
        while "populated 1" in (self._cgroup / "cgroup.events").read_text() and time.monotonic() < end:
            time.sleep(0.02)
        for folder, _, _ in os.walk(self._cgroup, topdown=False):
            os.rmdir(folder)

    def _enter(self, *namespaces: str) -> list[str]:
        leader = self._leader()
        assert leader, "the box is down"
        return ["nsenter", "-t", str(leader), *namespaces, "--"]

    def _leader(self) -> int | None:
        """Its PID 1, as this machine numbers it."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                except OSError:
                    continue
                if name == "systemd" and int(rest.split()[1]) == self._nspawn.pid:
                    return int(entry.name)
        return None

    def _is_up(self) -> bool:
        if not self._leader():
            return False
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() in {"running", "degraded"}

    def _wait(self, what: str, within: float, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + within
        while not condition():
            text = self.log.read_text(errors="replace")
            assert self._nspawn.poll() is None, f"{what} failed: {text[-3000:]}"
            assert time.monotonic() < end, f"{what} took longer than {within} s: {text[-3000:]}"
            time.sleep(0.03)


def _cgroup2() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(target)
    return None
