"""`trueup doctor`: whether this machine has what training needs."""

from __future__ import annotations

from dataclasses import asdict

import typer

from trueup.cli.output import FAILED, OK, AsJson, emit, show
from trueup.doctor import Check, diagnose


def doctor(as_json: AsJson = False) -> None:
    """Say whether this machine can train, and what to do where it cannot."""
    checks = diagnose()
    ready = all(check.ok for check in checks if check.required)
    if as_json:
        emit({"ok": ready, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            show(_line(check))
        show("ready to train" if ready else "not ready: mend what is marked with ✗")
    if not ready:
        raise typer.Exit(1)


def _line(check: Check) -> str:
    mark = OK if check.ok else FAILED if check.required else "!"
    advice = f"\n  {'':14}{check.advice}" if check.advice else ""
    return f"{mark} {check.name:14}{check.value}{advice}"
