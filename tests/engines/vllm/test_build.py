import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trueup.config import EngineConfig
from trueup.engines.vllm import int8
from trueup.engines.vllm.build import arguments, refuse, shapes
from trueup.engines.vllm.server import PYTHON_VARIABLE, Server, interpreter
from trueup.errors import ConfigError, EngineFault


def option(given: list[str], name: str) -> str:
    return given[given.index(name) + 1]


def test_the_arguments_ask_for_what_a_behaviour_policy_needs() -> None:
    config = EngineConfig(kind="vllm", dtype="bfloat16", slots=5, prefix_cache=False)
    given = arguments(config, Path("/m"))
    assert option(given, "--logprobs-mode") == "processed_logprobs"
    assert option(given, "--dtype") == "bfloat16"
    assert option(given, "--max-num-seqs") == "5"
    assert "--no-enable-prefix-caching" in given
    assert "--trust-remote-code" not in given
    quantised = arguments(EngineConfig(kind="vllm", quantize="fp8_row"), Path("/m"))
    assert option(quantised, "--quantization") == "fp8_per_channel"


@pytest.mark.parametrize("quantize", ["fp8", "int8_weight", "mxfp8", "int4"])
def test_a_grid_that_vllm_has_no_kernel_for_is_refused_with_those_it_has(quantize: Any) -> None:
    with pytest.raises(ConfigError, match="none, int8, fp8_row"):
        refuse(EngineConfig(kind="vllm", quantize=quantize), paced=False)


def test_what_vllm_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32_head"):
        refuse(EngineConfig(kind="vllm", float32_head=True), paced=False)
    with pytest.raises(ConfigError, match="token by token"):
        refuse(EngineConfig(kind="vllm"), paced=True)
    refuse(EngineConfig(kind="vllm", quantize="int8"), paced=False)


def test_shapes_come_from_the_headers_of_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    assert shapes(tmp_path) == {"a": (2, 3), "b": (4,)}


def test_a_directory_without_whole_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors"):
        shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ConfigError, match="safetensors"):
        shapes(tmp_path)


def test_int8_rounds_each_row_of_a_linear_layer_to_its_own_scale() -> None:
    weight = torch.tensor([[1.27, -0.634, 0.0], [0.0, 0.0, 0.0]])
    found = int8.quantized(
        {"layer.weight": weight, "norm.weight": torch.ones(3), "lm_head.weight": weight}
    )
    assert found["layer.weight"].dtype == torch.int8
    # Scale 1.27 / 127 = 0.01: 127, -63.4 -> -63, 0.
    assert found["layer.weight"].tolist() == [[127, -63, 0], [0, 0, 0]]
    assert found["layer.weight_scale"].shape == (2, 1)
    assert float(found["layer.weight_scale"][0, 0]) == pytest.approx(0.01)
    assert torch.equal(found["norm.weight"], torch.ones(3))
    assert torch.equal(found["lm_head.weight"], weight)


def test_an_int8_model_is_described_without_weights(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "model.safetensors").write_bytes(b"weights")
    target = int8.described(source, tmp_path / "int8")
    config = json.loads((target / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_without_vllm_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=f"make vllm.*{PYTHON_VARIABLE}"):
        interpreter()


def test_a_server_that_does_not_start_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    server = Server([], threads=1)
    with pytest.raises(EngineFault, match="exit status 3: no such model"):
        server.wait(10)
    assert not server.directory.exists()


def test_a_server_that_never_listens_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o700)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    server = Server([], threads=1)
    with pytest.raises(EngineFault, match=r"ready within 0\.3 s"):
        server.wait(0.3)
    assert server.why_ended().startswith("exit status -9")
