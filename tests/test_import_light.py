import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "pyarrow", "safetensors", "rich", "typer")
CODE = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


def heavy_modules_loaded_by(module: str) -> list[str]:
    answer = subprocess.run(
        [sys.executable, "-c", CODE, module, *HEAVY], capture_output=True, text=True, check=True
    )
    return answer.stdout.split()


@pytest.mark.parametrize(
    "module",
    [
        "trueup",
        "trueup.errors",
        "trueup.types",
        "trueup.config",
        "trueup.scheduling",
        "trueup.recipes.table",
        "trueup.sync.table",
        "trueup.doctor",
    ],
)
def test_the_base_loads_neither_torch_nor_any_extra(module: str) -> None:
    assert heavy_modules_loaded_by(module) == []


def test_the_probe_sees_a_heavy_import() -> None:
    assert "torch" in heavy_modules_loaded_by("trueup.sync.digest")
