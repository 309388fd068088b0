from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import psutil
import pytest

from trueup.environments.sandbox.base import Limits, Sandbox
from trueup.environments.sandbox.bwrap import BwrapSandbox
from trueup.environments.sandbox.uids import POOL, UidPool

_SMALL = Limits(output_bytes=100_000)


@pytest.fixture(scope="session")
def own_uids() -> Iterator[range]:
    """Sixteen user ids that no other process uses, tests running beside these included."""
    first = POOL[-1] + 1
    for start in range(first, first + 13 * 16, 16):
        with socket.socket(socket.AF_UNIX) as holder:
            try:
                holder.bind(f"\0trueup-test-uids-{start}")
            except OSError:
                continue
            yield range(start, start + 16)
            return
    pytest.skip("all user ids for tests are taken")


@pytest.fixture(autouse=True)
def nothing_is_left_running(own_uids: range) -> Iterator[None]:
    """After each test no new process, zombies included, is below this one or has its ids."""
    before = set(psutil.Process().children(recursive=True))
    yield
    own = set(psutil.Process().children(recursive=True)) - before
    sandboxed = {p for p in psutil.process_iter(["uids"]) if p.info["uids"].real in own_uids}
    assert own | sandboxed == set()


@pytest.fixture
def sandbox(isolating: Sandbox, own_uids: range) -> Sandbox:
    """The same with little room for output and with this session's user ids."""
    uids = UidPool(own_uids) if isolating.kind == "bwrap" else None
    return BwrapSandbox(uids=uids, limits=_SMALL)


@pytest.fixture
def python(sandbox: Sandbox) -> Callable[[str], str]:
    """Run a program that must succeed and give what it printed."""

    def run(program: str) -> str:
        result = sandbox.exec(program, "", deadline_s=10)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    return run
