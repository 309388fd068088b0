import json
import os
import signal
import subprocess
import sys

import pytest

from trueup.errors import RunDirectoryError
from trueup.records.lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from trueup.records.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
if len(sys.argv) > 2:
    import os
    if os.fork() == 0:
        time.sleep(30)
print("held", flush=True)
time.sleep(60)
"""


def start_holder(path, *more):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), *more], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def stop(process, with_signal=signal.SIGKILL):
    process.send_signal(with_signal)
    process.wait()
    process.stdout.close()


def test_the_second_controller_is_told_the_pid_of_the_first(tmp_path):
    path = tmp_path / "controller.lock"
    holder = start_holder(path)
    try:
        with pytest.raises(RunDirectoryError, match=f"pid {holder.pid} on "):
            RunLock(path)
    finally:
        stop(holder)


def test_the_file_of_a_killed_holder_is_no_obstacle(tmp_path):
    path = tmp_path / "controller.lock"
    stop(start_holder(path))
    assert json.loads(path.read_text())["pid"] != os.getpid()
    with RunLock(path) as lock:
        assert json.loads(path.read_text())["pid"] == lock.holder.pid == os.getpid()


def test_a_forked_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path):
    path = tmp_path / "controller.lock"
    holder = start_holder(path, "fork")
    stop(holder)
    RunLock(path).release()


def test_the_lock_holds_within_one_process_and_can_be_taken_again_after_release(tmp_path):
    path = tmp_path / "controller.lock"
    lock = RunLock(path)
    with pytest.raises(RunDirectoryError, match="this process"):
        RunLock(path)
    lock.release()
    lock.release()
    RunLock(path).release()


def test_a_refused_attempt_does_not_loosen_the_hold(tmp_path):
    path = tmp_path / "controller.lock"
    with RunLock(path):
        with pytest.raises(RunDirectoryError):
            RunLock(path)
        code = "import sys; from pathlib import Path; from trueup.records.lock import RunLock\n"
        code += "RunLock(Path(sys.argv[1]))"
        other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True)
        assert other.returncode == 1
        assert f"pid {os.getpid()} on ".encode() in other.stderr
