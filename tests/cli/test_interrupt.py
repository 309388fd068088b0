"""What Ctrl-C and SIGTERM leave behind, as a shell sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts with &
from trueup.cli import main
sys.exit(main(sys.argv[1:]))
"""
WORDS = ("train.steps=500", "train.groups_per_step=2", "train.samples_per_group=2")


def stop(
    tmp_path: Path, number: signal.Signals, after: str, **environment: str
) -> tuple[int, list[str], str]:
    """Start a run and send a signal once stderr says `after`.

    Ctrl-C reaches all processes of the run, SIGTERM the one that was started.

    Returns:
        Exit code, lines on stdout, what stderr said after the signal.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "train", *WORDS, "eval.samples=1", "--run", "a", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert process.stderr is not None
    assert any(after in line for line in process.stderr)
    send = os.killpg if number == signal.SIGINT else os.kill
    send(process.pid, number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.splitlines(), err


def test_before_training_nothing_is_kept(tmp_path):
    cache = tmp_path / "cache"
    told = "first the base policy is built"
    code, out, err = stop(tmp_path, signal.SIGINT, told, TRUEUP_CACHE=str(cache))
    assert code == 130
    assert [json.loads(line)["error"]["kind"] for line in out] == ["interrupted"]
    assert err == "error: interrupted before training began\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_during_training_a_checkpoint_is_kept_and_the_way_on_is_said(tmp_path, number, code):
    found, out, err = stop(tmp_path, number, "step 2/")
    assert found == code
    summary = json.loads(out[-1])
    assert len(out) == 1
    assert 2 <= summary["steps"] < 500
    assert f"interrupted by {number.name} and kept a checkpoint" in err
    assert "trueup train --resume --run a" in err
    assert list((tmp_path / "a" / "checkpoints").glob("step-*"))
