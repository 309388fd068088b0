"""Nothing in the package can turn data into running code: no pickle, eval or remote code.

The source is read as a syntax tree, so that neither a comment nor `model.eval()` counts.
"""

import ast
from pathlib import Path

import pytest

import trueup

SOURCE = Path(trueup.__file__).parent

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BUILTINS = {"eval", "exec", "__import__"}
KEYWORDS = {"weights_only": True, "trust_remote_code": False, "allow_pickle": False}
"""Keyword -> the only literal that may be passed for it."""

ALLOWED: frozenset[str] = frozenset()
"""Places (`path:line`) that may break the rule: none."""


def violations(source: str) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        found += [(node.lineno, name) for name in names if name.partition(".")[0] in MODULES]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in BUILTINS:
            found.append((node.lineno, node.id))
        if isinstance(node, ast.Call):
            found += [(node.lineno, problem) for problem in problems_of_call(node)]
        if isinstance(node, ast.Constant) and node.value in KEYWORDS:
            found.append((node.lineno, f"{node.value} as text"))  # **{"weights_only": ...}
    return found


def problems_of_call(call: ast.Call) -> list[str]:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    problems = [
        name
        for name, allowed in KEYWORDS.items()
        if name in given
        and not (isinstance(given[name], ast.Constant) and given[name].value is allowed)
    ]
    if ast.unparse(call.func) == "torch.load" and "weights_only" not in given:
        problems.append("torch.load without weights_only")
    return problems


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "def f():\n    import cloudpickle.x",
        "eval('1')",
        "run = exec",
        "__import__('os')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "load(path, **{'weights_only': False})",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=not 0)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_every_kind_of_violation_is_found(bad: str) -> None:
    assert violations(bad)


@pytest.mark.parametrize(
    "good",
    [
        "model.eval()",
        "class Config:\n    eval: int = 3",
        "# eval(x)\nre.compile('x')",
        "'never pickle'",
        "torch.load(path, weights_only=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=False)",
    ],
)
def test_what_is_harmless_is_not(good: str) -> None:
    assert violations(good) == []


def test_the_package_can_run_nothing_that_it_reads() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 10
    found = {
        f"{path.relative_to(SOURCE)}:{line}": problem
        for path in files
        for line, problem in violations(path.read_text(encoding="utf-8"))
    }
    assert {place: p for place, p in found.items() if place not in ALLOWED} == {}
