"""Facts about the machine: CPUs this process may use, and memory it may take.

Knows: affinity, core siblings, cgroup v1 and v2 limits, /proc/meminfo. Must not know: what the facts are used for
(core/autoconfig.py decides).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """`cores` counts physical cores among the allowed CPUs; `cpu_quota` is in CPUs; memory is in bytes."""

    cpus: int
    cores: int
    cpu_quota: float | None
    memory_available: int
    memory_limit: int | None  # the tightest cgroup limit


def read_machine(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> Machine:
    """Reads the facts below `root` (a stand-in in tests). Files that are missing mean "no limit".

    Memory that may be taken is the kernel's MemAvailable, lowered to what each enclosing cgroup still allows;
    page cache that a cgroup can give back (inactive_file) does not count as used.
    """
    cpus = affinity if affinity is not None else _affinity()
    quotas, limits, rooms = [], [], []
    for folder in _cgroup_folders(root):
        quota = _quota(folder)
        if quota is not None:
            quotas.append(quota)
        memory = _memory(folder)
        if memory is not None:
            limits.append(memory[0])
            rooms.append(max(0, memory[0] - memory[1]))
    return Machine(
        cpus=len(cpus),
        cores=_physical_cores(root, cpus),
        cpu_quota=min(quotas, default=None),
        memory_available=min([_mem_available(root), *rooms]),
        memory_limit=min(limits, default=None),
    )


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _physical_cores(root: Path, cpus: frozenset[int]) -> int:
    siblings = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings.add(_read(topology) or str(cpu))
    return len(siblings)


def _mem_available(root: Path) -> int:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Folders whose limits bind this process: its own cgroup in each hierarchy, and all above it.

    Inside a container the path named by /proc/self/cgroup may be the host's and not exist below the mount; the
    mount's own root, always among those above, is then the container's cgroup.
    """
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops = [mount, mount / "unified"]
        elif {"memory", "cpu"} & set(controllers.split(",")):
            tops = [mount / controllers, *(mount / name for name in controllers.split(","))]
        else:
            continue
        inner = Path(path.lstrip("/"))
        for top in tops:
            for part in (inner, *inner.parents):
                if (top / part).is_dir():
                    yield top / part


def _quota(folder: Path) -> float | None:
    text = _read(folder / "cpu.max")  # v2: "max 100000" or "150000 100000"
    if text is not None:
        quota, period = text.split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota_us is None or period_us is None or int(quota_us) <= 0:
        return None
    return int(quota_us) / int(period_us)


def _memory(folder: Path) -> tuple[int, int] | None:
    """(limit, use) of a cgroup with a memory limit, in bytes."""
    for limit_file, use_file, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, use = _read(folder / limit_file), _read(folder / use_file)
        if limit is None or use is None or limit == "max" or int(limit) >= UNLIMITED:
            continue
        cache = 0
        for line in (_read(folder / "memory.stat") or "").splitlines():
            key, _, value = line.partition(" ")
            if key == reclaimable:
                cache = int(value)
        return int(limit), max(0, int(use) - cache)
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
