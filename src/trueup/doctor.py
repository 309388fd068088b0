"""Whether this machine has what training needs, and what to do where it has not.

It inspects the machine and changes nothing; the sandbox alone is really tried, because an installed
one may still be forbidden.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trueup.config import cache_dir
from trueup.errors import SandboxUnavailable

_GIB = 1 << 30

MIN_CORES = 2
"""Trainer and engine compute at the same time, one thread each."""
MIN_MEMORY_BYTES = 2 * _GIB
"""Trainer, engine and controller each load torch."""
MIN_SHARED_BYTES = _GIB // 4
"""Two versions of a tiny policy, and room."""
MIN_CACHE_BYTES = _GIB
"""The base policy of the recipes, and checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at."""

    name: str
    ok: bool
    value: str
    """What was found."""
    advice: str = ""
    """What to do; empty when ok."""
    required: bool = True
    """Nothing trains without it."""


def diagnose() -> list[Check]:
    """Look at everything that a run needs, in the order in which to mend it."""
    return [
        check_python(sys.version_info[:3]),
        check_torch(find_version),
        check_package("transformers", (5,), "pip install 'trueup[torch]'", find_version),
        check_cores(_usable_cores()),
        check_memory(_available_memory()),
        check_space("shared memory", Path("/dev/shm"), MIN_SHARED_BYTES, _SHARED_ADVICE),
        check_space("cache", cache_dir(), MIN_CACHE_BYTES, _CACHE_ADVICE),
        check_sandbox(),
        check_git(shutil.which("git")),
    ]


_SHARED_ADVICE = 'enlarge it (docker: --shm-size=1g), or set sync.transport="filesystem"'
_CACHE_ADVICE = "free some space, or let TRUEUP_CACHE name a directory elsewhere"


def find_version(package: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(version: tuple[int, ...]) -> Check:
    """Python 3.11 or newer."""
    return _check(
        "python", version >= (3, 11), ".".join(map(str, version)), "install Python 3.11 or newer"
    )


def check_torch(find: Callable[[str], str | None]) -> Check:
    """Torch 2.7 or newer, and which build: a CPU build is all that the recipes need.

    Args:
        find: Version of a package by name, or None.
    """
    found = check_package("torch", (2, 7), "pip install 'trueup[torch]'", find)
    if not found.ok:
        return found
    local = found.value.partition("+")[2]
    if local:
        build = local
    else:
        # A CUDA build without a local version depends on the runtime's own packages.
        cuda = find("nvidia-cuda-runtime") or find("nvidia-cuda-runtime-cu12")
        build = f"cuda {cuda}" if cuda else "cpu"
    return _check("torch", True, f"{found.value.partition('+')[0]} ({build} build)", "")


def check_package(
    name: str, minimum: tuple[int, ...], advice: str, find: Callable[[str], str | None]
) -> Check:
    """A package of at least a version.

    Args:
        name: Its name.
        minimum: Leading numbers of the oldest version that does.
        advice: How to get it.
        find: Version of a package by name, or None.
    """
    version = find(name)
    if version is None:
        return _check(name, False, "not installed", advice)
    numbers = version.partition("+")[0].split(".")
    leading = tuple(int(part) for part in numbers[: len(minimum)] if part.isdecimal())
    return _check(name, leading >= minimum, version, advice)


def check_cores(cores: int) -> Check:
    """Cores that this process may use."""
    advice = "trainer and engine will take turns on one core"
    return _check("cores", cores >= MIN_CORES, str(cores), advice, required=False)


def check_memory(available_bytes: int | None) -> Check:
    """Memory that can be had without swapping; None where the system does not say."""
    if available_bytes is None:
        return _check("memory", True, "unknown", "")
    return _check(
        "memory",
        available_bytes >= MIN_MEMORY_BYTES,
        f"{_gib(available_bytes)} available",
        f"a run needs about {_gib(MIN_MEMORY_BYTES)}: close other programs",
    )


def check_space(name: str, path: Path, minimum_bytes: int, advice: str) -> Check:
    """Free space at a path, or where it would be made.

    Args:
        name: What the space is for.
        path: A directory; a missing one counts as its nearest existing parent if that is not the
            root of the file system.
        minimum_bytes: The least that does.
        advice: What to do with less.
    """
    existing = next((p for p in (path, *path.parents) if p.is_dir()), path)
    if existing == Path(path.anchor) != path:
        return _check(name, False, f"{path} does not exist", advice)
    if not os.access(existing, os.W_OK):
        return _check(name, False, f"{existing} is not writable", advice)
    free = shutil.disk_usage(existing).free
    return _check(name, free >= minimum_bytes, f"{_gib(free)} free in {path}", advice)


def check_sandbox() -> Check:
    """Whether model-written code can be isolated here: a program is really run."""
    from trueup.environments.sandbox.table import resolve

    try:
        sandbox = resolve("auto")
    except SandboxUnavailable as error:
        return _check("sandbox", False, "none works", error.message)
    sandbox.close()
    return _check("sandbox", True, f"{sandbox.kind}: {sandbox.description}", "")


def check_git(path: str | None) -> Check:
    """Git, by which a run records the code it ran."""
    advice = "install git: without it a run's manifest names no commit"
    if path is None:
        return _check("git", False, "not installed", advice, required=False)
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    works = answer.returncode == 0
    return _check("git", works, answer.stdout.strip(), advice, required=False)


def _check(name: str, ok: bool, value: str, advice: str, *, required: bool = True) -> Check:
    return Check(name=name, ok=ok, value=value, advice="" if ok else advice, required=required)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _available_memory() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
