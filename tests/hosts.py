"""Two machines without Slurm, `cta` and `ctb`, on this one: each with its own processes, network, mounts and name, joined by a cable.

On ctb runs a real sshd, at its own port 22. Nothing of it is outside of the two namespaces and a temporary folder: not in ~/.ssh, and
no network device here. Debian's openssh-server and openmpi-bin; needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conftest import TRAIN, Result, needs
from crosstrain import processes

FIRST, OTHER = "cta", "ctb"
ADDRESSES = {FIRST: "10.77.0.1", OTHER: "10.77.0.2"}
SSHD = "/usr/sbin/sshd"
SSHD_CONFIG = """\
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
"""
SSH_CONFIG = """\
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
"""
CABLE = "until ip address show ct0 2>&1 | grep -q inet; do sleep 0.05; done"
BEGIN = "hostname {name}; mount --bind {folder}/hosts /etc/hosts; ip link set lo up; " + CABLE
# ctb sees an empty folder in place of of-cta-alone, and has a /run of its own, where sshd wants a folder
SERVE = (
    "mount --bind {folder}/nothing {folder}/of-cta-alone; mount -t tmpfs none /run; mkdir /run/sshd; "
    "exec {sshd} -D -e -f {folder}/sshd_config"
)


class Hosts:
    """`start()` them, run things on cta with `on_first`, `stop()` them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hidden = folder / "of-cta-alone"
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        for name in ("of-cta-alone", "nothing"):
            (self.folder / name).mkdir()
        for name in ("hostkey", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        (self.folder / "known_hosts").write_text(f"{OTHER} {(self.folder / 'hostkey.pub').read_text()}")
        known = {"localhost": "127.0.0.1", **ADDRESSES}
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        (self.folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=self.folder))
        (self.folder / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
        wrapper = self.folder / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        self._machine(FIRST, "exec tail -f /dev/null")
        self._machine(OTHER, SERVE.format(folder=self.folder, sshd=SSHD))
        self._cable()
        end = time.monotonic() + 60
        while self.on_first("mpirun", "--allow-run-as-root", "--host", OTHER, "true").returncode:
            if time.monotonic() > end:
                raise AssertionError(f"no way to {OTHER}: {self.logs()}")
            time.sleep(0.2)

    def _machine(self, name: str, then: str) -> None:
        script = f"{BEGIN.format(name=name, folder=self.folder)}; {then}"
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self.folder / f"{name}.log", "wb") as log:
            self._machines[name] = subprocess.Popen(
                ["unshare", *spaces, "sh", "-c", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def pid(self, name: str) -> int:
        """The first process of a machine."""
        unshare = self._machines[name].pid
        end = time.monotonic() + 30
        while not (children := Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()):
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)
        return int(children[0])

    def _cable(self) -> None:
        """Inside of the two: here nothing is added."""
        pids = {name: self.pid(name) for name in ADDRESSES}
        commands = [(FIRST, f"link add ct0 type veth peer name ct0 netns {pids[OTHER]}")]
        for name, address in ADDRESSES.items():
            commands += [(name, f"address add {address}/30 dev ct0"), (name, "link set ct0 up")]
        for name, command in commands:
            subprocess.run(["nsenter", f"--target={pids[name]}", "--net", "ip", *command.split()], check=True)

    def _entered(self, cwd: Path, *command: str) -> list[str]:
        spaces = ["--net", "--uts", "--mount", "--pid"]
        return [shutil.which("nsenter") or "nsenter", f"--target={self.pid(FIRST)}", *spaces, f"--wdns={cwd}", *command]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "OMPI_MCA_plm_rsh_agent": str(self.folder / "ssh")}

    def on_first(self, *command: str, cwd: Path = Path("/"), env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        own = {**self.env, **(env or {})}
        entered = self._entered(cwd, *command)
        return subprocess.run(entered, env=own, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)

    def train(self, cwd: Path, *arguments: str, env: dict[str, str] | None = None) -> Result:
        """A whole train.py on cta."""
        done = self.on_first(sys.executable, str(TRAIN), *arguments, cwd=cwd, env=env)
        return Result(done.returncode, done.stdout, done.stderr, cwd)

    def start_train(self, cwd: Path, *arguments: str) -> subprocess.Popen[str]:
        """nsenter, which ends with its child train.py."""
        with open(cwd / "stdout", "w") as out:
            command = self._entered(cwd, sys.executable, str(TRAIN), *arguments)
            started = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, text=True)
        self._started.append(started)
        return started

    def host_of(self, pid: int) -> str:
        """On which of the machines a process is."""
        return next(name for name in ADDRESSES if os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{self.pid(name)}/ns/net"))

    def processes(self) -> list[int]:
        """Living ones on the two machines, but for their first, which do not wait for children that others have left to them."""
        firsts = [self.pid(name) for name in ADDRESSES]
        spaces = [os.readlink(f"/proc/{pid}/ns/pid") for pid in firsts]
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):  # ended
                stat = processes.read_stat(pid)
                if pid not in firsts and stat is not None and not stat.dead and os.readlink(f"/proc/{pid}/ns/pid") in spaces:
                    found.append(pid)
        return found

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log"))

    def stop(self) -> None:
        """With the first process of a machine the kernel ends all its others, and then takes its network away."""
        for name, machine in self._machines.items():
            with contextlib.suppress(AssertionError, OSError):
                os.kill(self.pid(name), signal.SIGKILL)  # not unshare, which waits for it
            try:
                machine.wait(20)
            except subprocess.TimeoutExpired:
                machine.kill()
                machine.wait()
        for started in self._started:
            started.wait()
        shutil.rmtree(self.folder)


def start_hosts() -> Hosts:
    """Running machines; skips where ssh or Open MPI is not installed, or this user may make none."""
    if any(shutil.which(program) is None for program in (SSHD, "ssh", "mpirun")):
        needs("apt", "apt-get install --no-install-recommends openssh-server openmpi-bin")
    if shutil.which("ip") is None:
        needs("apt", "apt-get install iproute2")
    spaces = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "type", "veth"]
    if os.getuid() != 0 or subprocess.run(spaces, capture_output=True).returncode:
        pytest.skip("needs root, and the right to make namespaces and network devices")
    hosts = Hosts(Path(tempfile.mkdtemp(prefix="ct-hosts-", dir="/tmp")))
    hosts.folder.chmod(0o755)
    try:
        hosts.start()
    except BaseException:
        hosts.stop()
        raise
    return hosts
