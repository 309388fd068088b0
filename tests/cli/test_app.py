import os
import resource
import subprocess
import sys

import pytest

from trueup import __version__

HEAVY = ("torch", "transformers", "numpy", "pyarrow", "safetensors", "tokenizers", "rich")
CODE = """
import sys
from trueup.cli import main
code = main(sys.argv[1:])
print("loaded:", *(name for name in {heavy} if name in sys.modules))
sys.exit(code)
"""
LIMIT_S = 0.5


def test_help_names_every_command(trueup):
    answer = trueup("--help")
    assert answer.code == 0
    listed = answer.out.partition("Commands:")[2].splitlines()
    names = [line.split()[0] for line in listed if line.strip()]
    assert names == [
        "train",
        "report",
        "audit",
        "whatif",
        "measure",
        "bisect",
        "reproduce",
        "doctor",
        "recipes",
        "config",
    ]
    assert trueup().out == answer.out == trueup("-h").out


def test_the_version_is_that_of_the_package(trueup):
    assert trueup("--version").out == f"trueup {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("trian",), "No such command 'trian'. Did you mean 'train'?"),
        (("train", "--dry-rum"), "No such option: --dry-rum"),
        (("train", "--run"), "Option '--run' requires an argument."),
        (("report",), "Missing argument 'RUN'."),
        (("audit", "a", "b"), "Got unexpected extra argument(s) (b)"),
        (("config",), "Missing command."),
    ],
)
def test_wrong_usage_is_said_once_and_exits_2(trueup, words, message):
    answer = trueup(*words)
    assert (answer.code, answer.out) == (2, "")
    first, *hints = answer.err.splitlines()
    assert first.startswith(f"error: {message}")
    assert all(hint.startswith("try: trueup") and hint.endswith("--help") for hint in hints)


def test_wrong_usage_is_one_object_where_json_is_asked_for(trueup):
    answer = trueup("train", "--nonsense", "--json")
    assert answer.code == 2
    assert answer.error.keys() == {"kind", "field", "rule", "value", "message"}
    assert answer.error["kind"] == "usage"
    assert "--nonsense" in answer.error["message"]


def test_what_the_user_typed_is_neither_markup_nor_an_escape_sequence(trueup):
    answer = trueup("train", "[red]\x1b[31mtiny[/red]")
    assert answer.code == 2
    assert "unknown recipe '[red]" in answer.err
    assert "\x1b" not in answer.err


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("train", "--help"), ("config", "show"), ("recipes",)]
)
def test_light_commands_are_quick_and_load_nothing_heavy(words, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run(
        [sys.executable, "-c", CODE.format(heavy=HEAVY), *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.stdout.splitlines()[-1].strip() == "loaded:"
    # Time on the processor: how busy the machine is does not count.
    assert after.ru_utime - before.ru_utime < LIMIT_S


def test_a_missing_extra_is_named_with_the_way_to_get_it(tmp_path):
    code = "import sys; sys.modules['torch'] = None\n" + CODE.format(heavy=())
    words = ["config", "explain", "correction.preset=tis"]
    answer = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert answer.stderr == (
        "error: this command needs the package 'torch'; "
        "install it with pip install 'trueup[torch]'\n"
    )


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    answer = subprocess.run(
        [sys.executable, "-c", "from trueup.cli import main; main(['config', 'schema'])"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert "Traceback" not in answer.stderr
