"""Each test is one thing a hostile program tries."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from trueup.environments.sandbox.base import Limits, Sandbox
from trueup.environments.sandbox.bwrap import BwrapSandbox
from trueup.environments.sandbox.seccomp import bpf_filter
from trueup.environments.sandbox.uids import UidPool

Python = Callable[[str], str]


def test_environment_of_the_host_is_not_visible(
    python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEUP_SECRET", "hunter2")
    seen = python(
        "import os, glob\n"
        "print(dict(os.environ))\n"
        "for path in glob.glob('/proc/[0-9]*/environ'): print(open(path).read())\n"
    )
    assert "PATH" in seen
    assert "SECRET" not in seen
    assert "hunter2" not in seen


def test_only_itself_is_in_its_process_table(python: Python) -> None:
    assert python("import glob; print(glob.glob('/proc/[0-9]*'))") == "['/proc/1']\n"


def test_inherits_no_file_of_the_host(python: Python) -> None:
    seen = python(
        "import os\n"
        "fds = os.listdir('/proc/self/fd')\n"
        "print(sorted(f for f in fds if os.path.lexists('/proc/self/fd/' + f)))\n"
    )
    assert seen == "['0', '1', '2']\n"


def test_files_of_the_host_are_not_visible(python: Python, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("expected outputs")
    paths = ["/etc/passwd", "/etc", "/root", "/home", "/sys", "/var", os.getcwd(), str(secret)]
    assert python(f"import os; print([p for p in {paths} if os.path.exists(p)])") == "[]\n"


def test_system_is_read_only_and_scratch_is_writable(python: Python) -> None:
    tried = ["/", "/usr", "/usr/bin", "/dev", "/proc"]
    seen = python(
        f"for folder in {[*tried, '/box', '/tmp', '/dev/shm']}:\n"
        "    try:\n"
        "        open(folder + '/x', 'w').close()\n"
        "        print(folder)\n"
        "    except OSError: pass\n"
    )
    assert seen.split() == ["/box", "/tmp", "/dev/shm"]


def test_its_own_program_cannot_be_rewritten_on_the_host_and_scratch_does_not_survive(
    python: Python,
) -> None:
    assert python("open('/box/left', 'w').write('1')") == ""
    assert python("import os; print(sorted(os.listdir('/box') + os.listdir('/tmp')))") == (
        "['main.py']\n"
    )


def test_network_is_refused_at_once(python: Python) -> None:
    started = time.monotonic()
    seen = python(
        "import socket\n"
        "for host in ('127.0.0.1', '1.1.1.1'):\n"
        "    try:\n"
        "        socket.create_connection((host, 80), timeout=5)\n"
        "        print('connected')\n"
        "    except OSError: print('refused')\n"
    )
    assert seen == "refused\nrefused\n"
    assert time.monotonic() - started < 4


@pytest.mark.skipif(bpf_filter() is None, reason="needs pyseccomp and libseccomp")
def test_sockets_that_ignore_the_network_namespace_are_refused(python: Python) -> None:
    seen = python(
        "import socket\n"
        "for family in (socket.AF_VSOCK, socket.AF_NETLINK, socket.AF_ALG, socket.AF_UNIX):\n"
        "    kind = socket.SOCK_RAW if family == socket.AF_NETLINK else socket.SOCK_STREAM\n"
        "    try: socket.socket(family, kind).close(); print(family.name)\n"
        "    except PermissionError: pass\n"
    )
    assert seen == "AF_UNIX\n"


@pytest.mark.skipif(bpf_filter() is None, reason="needs pyseccomp and libseccomp")
def test_memory_outside_any_file_system_is_refused(sandbox: Sandbox) -> None:
    result = sandbox.exec("import os; os.memfd_create('x')", "", deadline_s=10)
    assert "PermissionError" in result.stderr


def test_new_user_namespaces_are_refused(python: Python) -> None:
    program = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.unshare(0x10000000), libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))\n"
    )
    assert python(program) == "-1 -1\n"


def test_fork_bomb_is_contained(sandbox: Sandbox) -> None:
    bomb = (
        "import os, time\n"
        "made = 0\n"
        "while True:\n"
        "    try: pid = os.fork()\n"
        "    except BlockingIOError: break\n"
        "    if pid == 0: time.sleep(60)\n"
        "    made += 1\n"
        "print(made)\n"
    )
    result = sandbox.exec(bomb, "", deadline_s=10)
    assert not result.timed_out
    assert 1 <= int(result.stdout) < Limits().processes


def test_exponential_fork_bomb_ends_at_its_deadline_and_spares_its_neighbour(
    sandbox: Sandbox,
) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    results = []
    thread = threading.Thread(target=lambda: results.append(sandbox.exec(bomb, "", deadline_s=1.5)))
    thread.start()
    time.sleep(0.3)
    neighbour = sandbox.exec("import os; print(os.fork() >= 0)", "", deadline_s=10)
    assert "True" in neighbour.stdout
    thread.join()
    assert results[0].exit_code != 0
    assert results[0].timed_out
    assert results[0].seconds < 10  # a bomb also loads the machine that has to end it


def test_memory_of_one_process_is_bounded(sandbox: Sandbox) -> None:
    result = sandbox.exec("x = bytearray(600 << 20)", "", deadline_s=10)
    assert "MemoryError" in result.stderr
    assert result.exit_code == 1


def test_memory_of_many_processes_is_bounded_together(sandbox: Sandbox, own_uids: range) -> None:
    limits = Limits(memory_bytes=128 << 20)
    uids = UidPool(own_uids) if sandbox.kind == "bwrap" else None
    hog = (
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(b'x') * (64 << 20)\n"
        "        time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    result = BwrapSandbox(uids=uids, limits=limits).exec(hog, "", deadline_s=20)
    assert not result.timed_out
    assert result.exit_code == 137
    assert "bytes of memory" in result.stderr


@pytest.mark.parametrize("folder", ["/box", "/tmp", "/dev/shm"])
def test_disk_is_bounded(python: Python, folder: str) -> None:
    seen = python(
        "total = 0\n"
        "try:\n"
        "    for i in range(64):\n"
        f"        with open(f'{folder}/{{i}}', 'wb') as file: total += file.write(bytes(1 << 20))\n"
        "except OSError as error: print(error.strerror)\n"
        "print(total >> 20)\n"
    )
    reason, mebibytes = seen.splitlines()
    assert reason == "No space left on device"
    assert int(mebibytes) <= 32


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_flood_of_output_is_cut_and_killed(sandbox: Sandbox, stream: str) -> None:
    flood = f"import sys\nwhile True: sys.{stream}.write('x' * 4096)\n"
    result = sandbox.exec(flood, "", deadline_s=10)
    assert result.truncated
    assert not result.timed_out
    assert len(getattr(result, stream)) == 100_000


def test_output_of_exactly_the_bound_is_whole(sandbox: Sandbox) -> None:
    result = sandbox.exec("print('x' * 99_999)", "", deadline_s=10)
    assert not result.truncated
    assert len(result.stdout) == 100_000


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(60)",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)",
        "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(60)",
    ],
    ids=["spins", "sleeps", "closes its output", "ignores signals", "forks away"],
)
def test_hung_program_is_killed_within_a_second_of_its_deadline(
    sandbox: Sandbox, program: str
) -> None:
    started = time.monotonic()
    result = sandbox.exec(program, "", deadline_s=0.5)
    assert result.timed_out
    assert result.exit_code == 137
    assert 0.5 <= time.monotonic() - started < 5


def test_end_of_the_main_process_ends_what_it_started(sandbox: Sandbox) -> None:
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nprint('end')"
    )
    result = sandbox.exec(program, "", deadline_s=10)
    assert (result.stdout, result.timed_out) == ("end\n", False)
    assert result.seconds < 5


def test_concurrent_sandboxes_have_ids_of_their_own(sandbox: Sandbox, own_uids: range) -> None:
    if sandbox.kind != "bwrap":
        pytest.skip("needs root")
    program = "import os, time; print(os.getuid(), os.getgid()); time.sleep(0.5)"
    seen: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: seen.append(sandbox.exec(program, "", deadline_s=10).stdout)
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = {tuple(map(int, line.split())) for line in seen}
    assert len(ids) == 4
    assert all(uid == gid and uid in own_uids for uid, gid in ids)


def test_death_of_the_host_process_ends_its_sandboxes(sandbox: Sandbox, own_uids: range) -> None:
    if sandbox.kind != "bwrap":
        pytest.skip("the pool's ids tell whose processes they are")
    host = psutil.Popen(
        [
            sys.executable,
            "-c",
            "from trueup.environments.sandbox.bwrap import BwrapSandbox\n"
            "from trueup.environments.sandbox.uids import UidPool\n"
            f"sandbox = BwrapSandbox(uids=UidPool({own_uids}))\n"
            "sandbox.exec('import time; time.sleep(60)', '', deadline_s=60)\n",
        ]
    )

    def sandboxed(*, zombies: bool = False) -> list[psutil.Process]:
        return [
            p
            for p in psutil.process_iter(["uids", "status"])
            if p.info["uids"].real in own_uids
            and (zombies or p.info["status"] != psutil.STATUS_ZOMBIE)
        ]

    def eventually(condition: Callable[[], bool]) -> bool:
        until = time.monotonic() + 10
        while not condition() and time.monotonic() < until:
            time.sleep(0.02)
        return condition()

    assert eventually(lambda: any(p.name().startswith("python") for p in sandboxed()))
    host.kill()
    host.wait()
    assert eventually(lambda: sandboxed() == [])
    # Zombies left: whoever adopted them may take a moment to reap them.
    assert eventually(lambda: sandboxed(zombies=True) == [])
