"""Which sandboxes exist, and how the strongest one that works is found.

To add one: a file beside this one with a class that satisfies `base.Sandbox`, and a line in
`SANDBOXES`, strongest first; `tests/environments/sandbox/` then probes what it claims. A backend
counts only after it has really run a program here: an installed one may still be forbidden.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping

from trueup.environments.sandbox.base import Sandbox
from trueup.environments.sandbox.bwrap import BwrapSandbox
from trueup.environments.sandbox.none import NoSandbox
from trueup.environments.sandbox.uids import UidPool
from trueup.errors import ConfigError, EnvironmentFault, SandboxUnavailable

_PROBE_S = 10.0


def _bwrap_own_uid() -> Sandbox:
    if os.geteuid() != 0:
        raise EnvironmentFault("a user id per sandbox needs root", field="start")
    return BwrapSandbox(uids=UidPool())


def _bwrap_user() -> Sandbox:
    if os.geteuid() == 0:
        raise EnvironmentFault("root's processes are not limited", field="start")
    return BwrapSandbox(uids=None)


SANDBOXES: Mapping[str, tuple[Callable[[], Sandbox], ...]] = {
    "bwrap": (_bwrap_own_uid, _bwrap_user),
}
"""Isolating backends by `sandbox.kind`, with the variants of each, strongest first."""


def resolve(
    kind: str,
    *,
    backends: Mapping[str, tuple[Callable[[], Sandbox], ...]] = SANDBOXES,
    system: str = platform.system(),
    release: str = platform.release(),
) -> Sandbox:
    """The sandbox that `sandbox.kind` asks for, after it has run a program here.

    Args:
        kind: `auto` (the strongest that works), a name in the table, or `none`.
        backends: Table to choose from.
        system: Operating system, as `platform.system` names it.
        release: Kernel release, as `platform.release` names it.

    Raises:
        ConfigError: There is no such kind.
        SandboxUnavailable: Nothing that isolates works here; the message says what to do.
    """
    if kind == "none":
        return NoSandbox()
    if kind != "auto" and kind not in backends:
        raise ConfigError(
            field="sandbox.kind", rule=f"one of auto, {', '.join(backends)}, none", value=kind
        )
    if obstacle := _obstacle(system, release):
        raise _unavailable(kind, obstacle)
    failures: list[str] = []
    for name in backends if kind == "auto" else (kind,):
        for variant in backends[name]:
            try:
                sandbox = variant()
                result = sandbox.exec("print(6 * 7)", "", deadline_s=_PROBE_S)
            except (EnvironmentFault, OSError) as error:
                failures.append(f"{name}: {error}")
                continue
            if result.stdout == "42\n" and result.exit_code == 0:
                return sandbox
            sandbox.close()
            failures.append(f"{name}: the probe ended with {result.exit_code}: {result.stderr}")
    raise _unavailable(kind, "; ".join(failures))


def _obstacle(system: str, release: str) -> str:
    if system != "Linux":
        return f"{system} has no Linux namespaces"
    if "microsoft" in release.lower():
        return "under WSL a program can reach the Windows host around the namespaces"
    return ""


def _unavailable(kind: str, why: str) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"no sandbox for model-written code works here ({why}). On Linux install bubblewrap "
        "(Debian, Ubuntu: apt install bubblewrap) and allow user namespaces; or, if this machine "
        'may be damaged by what the model writes, write sandbox.kind = "none"',
        field="sandbox.kind",
        rule="a backend that works on this machine",
        value=kind,
    )
