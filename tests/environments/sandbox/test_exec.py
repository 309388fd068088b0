from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trueup
from trueup.environments.sandbox.base import Limits, Sandbox
from trueup.environments.sandbox.bwrap import INTERPRETER, BwrapSandbox
from trueup.environments.sandbox.none import NoSandbox
from trueup.environments.sandbox.process import resident_bytes, sealed
from trueup.environments.sandbox.uids import UidPool
from trueup.errors import EnvironmentFault


@pytest.fixture(params=["isolating", "none"])
def any_sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "none":
        return NoSandbox(limits=Limits(output_bytes=100_000))
    sandbox: Sandbox = request.getfixturevalue("sandbox")
    return sandbox


def test_input_output_and_exit_code_pass_through(any_sandbox: Sandbox) -> None:
    program = "import sys\nprint(input().upper())\nprint('héé', file=sys.stderr)\nsys.exit(7)"
    result = any_sandbox.exec(program, "abc\nrest", deadline_s=10)
    assert (result.stdout, result.stderr, result.exit_code) == ("ABC\n", "héé\n", 7)
    assert (result.timed_out, result.truncated) == (False, False)
    assert 0 < result.seconds < 10


def test_large_input_is_whole_and_unread_input_is_no_error(any_sandbox: Sandbox) -> None:
    text = "x" * 1_000_000
    counted = any_sandbox.exec("import sys; print(len(sys.stdin.read()))", text, deadline_s=10)
    assert counted.stdout == "1000000\n"
    assert any_sandbox.exec("print(1)", text, deadline_s=10).stdout == "1\n"


def test_bytes_that_are_no_text_are_replaced(any_sandbox: Sandbox) -> None:
    program = "import sys; sys.stdout.buffer.write(b'a\\xff')"
    assert any_sandbox.exec(program, "", deadline_s=10).stdout == "a\ufffd"


def test_death_by_a_signal_is_128_and_its_number(any_sandbox: Sandbox) -> None:
    program = "import ctypes; ctypes.string_at(0)"
    assert any_sandbox.exec(program, "", deadline_s=10).exit_code == 128 + 11


def test_program_that_does_not_parse_is_the_programs_failure(any_sandbox: Sandbox) -> None:
    result = any_sandbox.exec("def", "", deadline_s=10)
    assert result.exit_code == 1
    assert "SyntaxError" in result.stderr


def test_hung_program_and_flood_end(any_sandbox: Sandbox) -> None:
    hung = any_sandbox.exec("while True: pass", "", deadline_s=0.3)
    assert (hung.timed_out, hung.exit_code) == (True, 137)
    flood = any_sandbox.exec("while True: print('x' * 1000)", "", deadline_s=10)
    assert (flood.truncated, len(flood.stdout)) == (True, 100_000)


def test_closed_sandbox_refuses_and_closes_twice() -> None:
    for sandbox in (NoSandbox(), BwrapSandbox(uids=None)):
        sandbox.close()
        sandbox.close()
        with pytest.raises(EnvironmentFault) as caught:
            sandbox.exec("print(1)", "", deadline_s=10)
        assert caught.value.field == "closed"


def test_trivial_program_is_quick(sandbox: Sandbox) -> None:
    times = [sandbox.exec("print(1)", "", deadline_s=10).seconds for _ in range(10)]
    # About 0.035 s on two cores; the bound is for a machine with other work.
    assert min(times) < 0.2


def crowd(uid: int, processes: int) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen(["/bin/sleep", "30"], user=uid) for _ in range(processes)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to fill another user's process limit")
def test_sandbox_that_cannot_start_is_a_fault_after_retries(
    sandbox: Sandbox, own_uids: range
) -> None:
    uid = own_uids[7]
    full = crowd(uid, 4)
    try:
        narrow = BwrapSandbox(uids=UidPool(range(uid, uid + 1)), limits=Limits(processes=4))
        with pytest.raises(EnvironmentFault, match="Resource temporarily unavailable") as caught:
            narrow.exec("print(1)", "", deadline_s=10)
        assert caught.value.field == "start"
        roomy = BwrapSandbox(uids=UidPool(range(uid, uid + 2)), limits=Limits(processes=4))
        # The retry takes the next id, whose processes are none.
        assert [roomy.exec("print(1)", "", deadline_s=10).stdout for _ in range(3)] == ["1\n"] * 3
    finally:
        for process in full:
            process.kill()
        for process in full:
            process.wait()


def test_ids_are_lent_once_across_pools_and_given_back(own_uids: range) -> None:
    uids = own_uids[:2]
    one, other = UidPool(uids), UidPool(uids)
    with one.lend() as a, other.lend() as b:
        assert {a, b} == set(uids)
        with pytest.raises(EnvironmentFault) as caught, one.lend():
            pass
        assert caught.value.field == "start"
    with one.lend() as a, one.lend() as b:
        assert {a, b} == set(uids)


def test_sealed_data_cannot_be_changed() -> None:
    with sealed(b"abc") as file:
        with pytest.raises(PermissionError):
            os.write(file.fileno(), b"x")
        assert file.read() == b"abc"


def test_resident_memory_counts_children() -> None:
    program = "x = bytearray(b'x') * (100 << 20)\nprint('ready', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child_bytes = resident_bytes(child.pid)
        assert 100 << 20 < child_bytes < 200 << 20
        assert resident_bytes(os.getpid()) > child_bytes
        child.communicate(b"\n")
    assert resident_bytes(None) == 0


_AS_USER = """
import os, time
from trueup.environments.sandbox.table import resolve
sandbox = resolve("auto")
print(sandbox.kind)
print(sandbox.exec("print(input())", "hello", deadline_s=10).stdout.strip())
bomb = '''
import os, time
made = 0
while True:
    try: pid = os.fork()
    except BlockingIOError: break
    if pid == 0: time.sleep(60)
    made += 1
print(0 < made < 64)
'''
print(sandbox.exec(bomb, "", deadline_s=10).stdout.strip())
hung = sandbox.exec("while True: pass", "", deadline_s=0.5)
print(hung.timed_out, hung.exit_code)
print(sandbox.exec("import os; print(os.path.exists('/etc/passwd'))", "", deadline_s=10).stdout)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root already")
def test_user_without_root_gets_the_weaker_variant(isolating: Sandbox, own_uids: range) -> None:
    uid = own_uids[-1]
    probe = ["bwrap", "--unshare-all", "--as-pid-1", "--ro-bind", "/", "/", "true"]
    if subprocess.run(probe, user=uid, capture_output=True, check=False).returncode:
        pytest.skip("users may not make namespaces here")
    package = Path(trueup.__file__).parents[1]
    started = time.monotonic()
    done = subprocess.run(
        [INTERPRETER, "-c", _AS_USER],
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "No module named 'trueup'" in done.stderr:
        pytest.skip("another user cannot read this installation")
    assert done.stdout.split() == ["bwrap-user", "hello", "True", "True", "137", "False"], (
        done.stderr
    )
    assert time.monotonic() - started < 30
