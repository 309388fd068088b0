import shutil
from pathlib import Path

from trueup import doctor
from trueup.doctor import Check

GIB = 1 << 30


def finder(**versions: str):
    return lambda name: versions.get(name.replace("-", "_"))


def test_every_check_names_what_it_looked_at_and_only_failures_give_advice() -> None:
    checks = doctor.diagnose()
    assert [check.name for check in checks] == [
        "python",
        "torch",
        "transformers",
        "cores",
        "memory",
        "shared memory",
        "cache",
        "sandbox",
        "git",
    ]
    for check in checks:
        assert check.value
        assert check.ok == (check.advice == "")


def test_an_old_python_is_found() -> None:
    assert doctor.check_python((3, 11, 0)).ok
    assert doctor.check_python((3, 10, 14)) == Check(
        name="python", ok=False, value="3.10.14", advice="install Python 3.11 or newer"
    )


def test_the_build_of_torch_is_told_without_importing_it() -> None:
    def value(**versions: str) -> str:
        return doctor.check_torch(finder(**versions)).value

    assert value(torch="2.13.0+cpu") == "2.13.0 (cpu build)"
    assert value(torch="2.13.0+cu130") == "2.13.0 (cu130 build)"
    assert value(torch="2.13.0") == "2.13.0 (cpu build)"
    assert value(torch="2.13.0", nvidia_cuda_runtime="13.0.48") == "2.13.0 (cuda 13.0.48 build)"


def test_a_missing_or_old_package_is_found() -> None:
    assert doctor.check_torch(finder()).value == "not installed"
    assert not doctor.check_torch(finder(torch="2.6.9")).ok
    assert doctor.check_package("transformers", (5,), "x", finder(transformers="5.0.0rc1")).ok
    assert not doctor.check_package("transformers", (5,), "x", finder(transformers="4.57.1")).ok


def test_few_cores_and_little_memory_are_found() -> None:
    assert doctor.check_cores(2).ok
    assert not doctor.check_cores(1).ok
    assert doctor.check_memory(2 * GIB).ok
    assert not doctor.check_memory(2 * GIB - 1).ok
    assert doctor.check_memory(None).ok


def test_space_is_measured_where_the_directory_would_be_made(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    missing = tmp_path / "a" / "b"
    assert doctor.check_space("cache", missing, free // 2, "x").ok
    assert doctor.check_space("cache", missing, 2 * free, "make room").advice == "make room"
    assert not missing.parent.exists()


def test_a_missing_file_system_is_not_taken_for_the_root() -> None:
    check = doctor.check_space("shared memory", Path("/no-such-place"), 1, "mount it")
    assert (check.ok, check.value) == (False, "/no-such-place does not exist")


def test_missing_git_is_found() -> None:
    assert not doctor.check_git(None).ok


def test_only_what_nothing_trains_without_is_required() -> None:
    optional = {check.name for check in doctor.diagnose() if not check.required}
    assert optional == {"cores", "git"}
    assert not doctor.check_cores(1).required
    assert not doctor.check_git(None).required
    assert doctor.check_torch(finder()).required
