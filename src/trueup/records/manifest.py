"""What produced a run: code, versions, hardware, seeds, command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import trueup
from trueup.records.files import write_atomic

_LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "pyarrow", "pydantic", "msgpack")


def build_manifest(
    *, seeds: Mapping[str, int], command: Sequence[str] | None = None
) -> dict[str, Any]:
    """Describe this process and machine; imports nothing heavy.

    Args:
        seeds: Every seed by what it seeds.
        command: Arguments of the program; this process's if None.
    """
    return {
        "trueup": trueup.__version__,
        "git_revision": git_revision(Path(trueup.__file__).parent),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "platform": platform.platform(),
        "hardware": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "cores_usable": _cores_usable(),
            "memory_bytes": _memory_bytes(),
        },
        "seeds": dict(seeds),
        "command": list(sys.argv if command is None else command),
        "started_unix_s": time.time(),
    }


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest whole or not at all."""
    write_atomic(path, (json.dumps(manifest, indent=2) + "\n").encode())


def git_revision(source: Path) -> str | None:
    """Commit that tracks a source folder, `-dirty` if changed since; None without git.

    A folder that merely lies inside some other repository (an installed package) has none.
    """
    base = ["git", "-C", str(source)]
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        tracked = [*base, "ls-files", "--error-unmatch", "__init__.py"]
        subprocess.run(tracked, check=True, capture_output=True, timeout=10)
        found = subprocess.run([*base, *describe], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.decode().strip()


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _cores_usable() -> int | None:
    """Cores that this process may run on, where the system tells."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
