"""read_machine on made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from pinnate.core.machine import read_machine

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable:   16777216 kB\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_no_limits(root: Path) -> None:
    machine = read_machine(root, frozenset({0, 1, 2, 3}))
    assert (machine.cpus, machine.cores, machine.cpu_quota) == (4, 4, None)
    assert machine.memory_available == 16 * GIB
    assert machine.memory_limit is None


def test_hyperthreads_count_once_and_only_among_allowed_cpus(root: Path) -> None:
    for cpu in range(8):
        name = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(root, name, f"{cpu % 4},{cpu % 4 + 4}")
    assert read_machine(root, frozenset(range(8))).cores == 4
    assert read_machine(root, frozenset({0, 4, 1})).cores == 2


def test_cgroup_v2_takes_the_tightest_of_all_levels(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/kube/pod/box")
    write(root, "sys/fs/cgroup/kube/pod/box/cpu.max", "max 100000")
    write(root, "sys/fs/cgroup/kube/pod/cpu.max", "150000 100000")
    write(root, "sys/fs/cgroup/kube/cpu.max", "400000 100000")
    write(root, "sys/fs/cgroup/kube/pod/box/memory.max", str(4 * GIB))
    write(root, "sys/fs/cgroup/kube/pod/box/memory.current", str(3 * GIB))
    write(root, "sys/fs/cgroup/kube/pod/box/memory.stat", f"anon 5\ninactive_file {GIB}")
    machine = read_machine(root, frozenset({0, 1}))
    assert machine.cpu_quota == 1.5
    assert machine.memory_limit == 4 * GIB
    assert machine.memory_available == 2 * GIB


def test_cgroup_v1_with_a_path_of_the_host(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n1:name=systemd:/")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GIB))
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(GIB))
    write(root, "sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {GIB // 2}")
    write(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000")
    write(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    machine = read_machine(root, frozenset({0}))
    assert machine.cpu_quota == 0.5
    assert machine.memory_available == GIB + GIB // 2


def test_cgroup_v1_without_limits(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/\n3:cpu:/")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "5")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    machine = read_machine(root, frozenset({0}))
    assert (machine.cpu_quota, machine.memory_limit, machine.memory_available) == (None, None, 16 * GIB)


def test_this_machine() -> None:
    machine = read_machine()
    assert 1 <= machine.cores <= machine.cpus
    assert machine.memory_available > 0
