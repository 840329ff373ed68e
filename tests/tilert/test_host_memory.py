"""What counts as free main memory: the machine's, within control groups and `ulimit`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilert import host_memory as module
from tilert.host_memory import host_memory

GIB = 2**30
ALL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if sys.platform == "linux" else 0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux says these things in files")


class Machine:
    """A /proc and a /sys/fs/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.write(self.proc / "meminfo", "MemTotal: 9 kB\nMemAvailable:  524288 kB\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def groups(self, text: str) -> None:
        """What the process is in."""
        self.write(self.proc / "self" / "cgroup", text)

    def group(self, path: str, limit: int | str, used: int, stat: str = "") -> None:
        """A group of version 2."""
        for name, value in (("max", limit), ("current", used), ("stat", stat)):
            self.write(self.cgroup / path / f"memory.{name}", f"{value}\n")

    def old_group(self, path: str, limit: int, used: int, stat: str = "") -> None:
        """A group of version 1."""
        names = (("limit_in_bytes", limit), ("usage_in_bytes", used), ("stat", stat))
        for name, value in names:
            self.write(self.cgroup / "memory" / path / f"memory.{name}", f"{value}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(module, "_PROC", made.proc)
    monkeypatch.setattr(module, "_CGROUP", made.cgroup)
    return made


def test_without_limits_it_is_what_the_system_says(machine: Machine) -> None:
    assert host_memory() == (GIB // 2, ALL)
    machine.groups("0::/user.slice\n")
    machine.group("user.slice", "max", 12345)
    assert host_memory() == (GIB // 2, ALL)


def test_where_the_system_does_not_say_it_is_half(machine: Machine) -> None:
    (machine.proc / "meminfo").unlink()
    assert host_memory() == (ALL // 2048 * 1024, ALL)


def test_a_containers_limit(machine: Machine) -> None:
    machine.groups("0::/\n")
    machine.group("", 1000, 400)
    assert host_memory() == (600, 1000)
    machine.group("", 1000, 1400)
    assert host_memory() == (0, 1000)


def test_a_group_has_the_limits_of_those_above_it(machine: Machine) -> None:
    machine.groups("0::/slice/service\n")
    machine.group("slice/service", 5000, 100)
    machine.group("slice", 3000, 2500)
    machine.group("", "max", 0)
    assert host_memory() == (500, 3000)


def test_files_that_a_group_keeps_in_memory_are_no_memory_that_is_gone(machine: Machine) -> None:
    """A model that was just downloaded fills a container's page cache."""
    machine.groups("0::/\n")
    stat = "anon 100\nfile 800\ninactive_file 700\nactive_file 50\nslab_reclaimable 20"
    machine.group("", 1000, 900, stat)
    assert host_memory() == (1000 - 900 + 770, 1000)


def test_groups_of_version_1(machine: Machine) -> None:
    machine.groups("5:cpu,cpuacct:/\n4:memory:/a/b\n1:name=systemd:/x:y\n0::/\n")
    machine.old_group("a/b", 4000, 3000, "inactive_file 1\ntotal_inactive_file 30")
    machine.old_group("a", 9000, 8500)
    machine.old_group("", 2**63 - 4096, 0)
    assert host_memory() == (500, 4000)


def test_a_path_of_the_host_leaves_the_containers_own_limit(machine: Machine) -> None:
    machine.groups("4:memory:/docker/0123\n")
    machine.old_group("", 4000, 3000)
    assert host_memory() == (1000, 4000)


@pytest.mark.parametrize("which", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_what_ulimit_leaves(which: str) -> None:
    program = (
        "import resource; from tilert.host_memory import host_memory\n"
        f"resource.setrlimit(resource.{which}, (2**30, 2**30))\n"
        "print(*host_memory())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    free, total = map(int, done.stdout.split())
    assert total == min(GIB, ALL) and 0 < free < GIB
