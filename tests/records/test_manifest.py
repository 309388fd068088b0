import json
import subprocess
import sys

import trueup
from trueup.records.manifest import build_manifest, git_revision, write_manifest


def test_the_manifest_says_what_ran_where_and_with_which_seeds(tmp_path):
    path = tmp_path / "manifest.json"
    write_manifest(path, build_manifest(seeds={"run": 3}, command=["trueup", "train"]))
    found = json.loads(path.read_text())
    assert found["trueup"] == trueup.__version__
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert found["seeds"] == {"run": 3}
    assert found["command"] == ["trueup", "train"]
    assert found["libraries"]["pyarrow"]
    assert found["hardware"]["cores"] >= found["hardware"]["cores_usable"] >= 1
    assert found["hardware"]["memory_bytes"] > 2**20


def test_building_the_manifest_imports_nothing_heavy():
    code = """
import sys
from trueup.records import audit, directory, ledger, lock, manifest, tokens
manifest.build_manifest(seeds={})
print(sorted({"torch", "transformers", "numpy", "pyarrow"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_revision_is_that_of_a_tracked_source_and_marks_changes(tmp_path):
    source = tmp_path / "pkg"
    source.mkdir()
    (source / "__init__.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    assert git_revision(source) is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert git_revision(source) == head
    (source / "__init__.py").write_text("a = 2\n")
    assert git_revision(source) == f"{head}-dirty"
