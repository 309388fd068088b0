from __future__ import annotations

import pytest

from trueup.environments.sandbox.base import ExecResult, Sandbox
from trueup.environments.sandbox.table import SANDBOXES, resolve
from trueup.errors import ConfigError, EnvironmentFault, SandboxUnavailable


class Scripted:
    """A sandbox that answers the probe as told."""

    description = "scripted"

    def __init__(self, kind: str, stdout: str) -> None:
        self.kind = kind
        self._stdout = stdout

    def exec(self, program: str, stdin: str, *, deadline_s: float) -> ExecResult:
        return ExecResult(
            stdout=self._stdout,
            stderr="odd",
            exit_code=0,
            timed_out=False,
            truncated=False,
            seconds=0.0,
        )

    def close(self) -> None:
        pass


def broken() -> Sandbox:
    raise EnvironmentFault("bubblewrap did not start: no namespaces", field="start")


def missing() -> Sandbox:
    raise FileNotFoundError("bwrap")


def lying() -> Sandbox:
    return Scripted("lying", "43\n")


def working() -> Sandbox:
    return Scripted("working", "42\n")


LINUX = {"system": "Linux", "release": "6.1.0"}


def test_auto_takes_the_first_that_really_runs_a_program() -> None:
    table = {"a": (broken, missing), "b": (lying, working)}
    assert resolve("auto", backends=table, **LINUX).kind == "working"


def test_named_kind_is_not_replaced_by_another() -> None:
    with pytest.raises(SandboxUnavailable, match="no namespaces"):
        resolve("a", backends={"a": (broken,), "b": (working,)}, **LINUX)


def test_nothing_that_works_is_refused_with_what_to_do() -> None:
    with pytest.raises(SandboxUnavailable) as caught:
        resolve("auto", backends={"a": (broken, missing, lying)}, **LINUX)
    for part in ("install bubblewrap", 'sandbox.kind = "none"', "no namespaces", "odd"):
        assert part in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("system", "release"),
    [("Darwin", "24.0"), ("Windows", "11"), ("Linux", "5.15.1-microsoft-standard-WSL2")],
)
def test_systems_that_cannot_isolate_are_refused_before_any_probe(
    system: str, release: str
) -> None:
    with pytest.raises(SandboxUnavailable, match='"none"'):
        resolve("auto", backends={"a": (working,)}, system=system, release=release)
    assert resolve("none", system=system, release=release).kind == "none"


def test_none_is_never_chosen_by_itself() -> None:
    assert "none" not in SANDBOXES
    with pytest.raises(SandboxUnavailable):
        resolve("auto", backends={}, **LINUX)


def test_unknown_kind_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="docker"):
        resolve("docker")


def test_what_is_chosen_says_what_it_is(isolating: Sandbox) -> None:
    assert isolating.kind in ("bwrap", "bwrap-user")
    assert "kernel shared" in isolating.description
    assert "seccomp" in isolating.description or "filtered" in isolating.description
