from array import array
from collections.abc import Callable, Iterator
from inspect import signature

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trueup.errors import CheckpointError
from trueup.models.load import state_tensors
from trueup.models.logprobs import action_logprobs
from trueup.models.packed import PackedBatch
from trueup.models.quantization.fake import (
    block_linears,
    quantized_forward,
    quantized_logprobs,
    scales_of_tokens,
)
from trueup.models.quantization.recording import Recorder, RecordingTap
from trueup.models.quantization.schemes import SCHEMES

VOCAB = 40
CACHE = "cache" if "cache" in signature(Qwen2ForCausalLM.forward).parameters else "past_key_values"
"""What transformers calls the argument."""
IDS = torch.arange(24).view(2, 12) % VOCAB


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> PreTrainedModel:
    """Untied, with biases, and with weights that matter."""
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def _logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def _batch() -> PackedBatch:
    """Two segments; the first samples, is given three tokens, and samples again."""
    flags = [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]
    ids = [[(7 * i + s) % VOCAB for i in range(len(f))] for s, f in enumerate(flags)]
    return PackedBatch.pack([array("i", row) for row in ids], [array("b", row) for row in flags])


def _rounded(model: PreTrainedModel, which: Callable[[str], bool], scheme: str) -> None:
    """Round tensors of the model for good."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if which(name):
                weight = tensor if tensor.ndim == 2 else tensor[None]
                rounded = SCHEMES[scheme].weight.rounded(weight.detach().float())
                tensor.copy_(rounded.view_as(tensor))


def test_block_linears_are_all_but_the_head_in_module_order(model: PreTrainedModel) -> None:
    names = list(block_linears(model))
    order = [f"self_attn.{p}_proj" for p in "qkvo"] + [
        f"mlp.{p}_proj" for p in ("gate", "up", "down")
    ]
    assert names == [f"model.layers.{i}.{name}" for i in range(2) for name in order]


def test_a_model_without_linear_modules_is_refused() -> None:
    config = GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(CheckpointError, match="linear layers, got 'GPT2LMHeadModel'"):
        block_linears(GPT2LMHeadModel(config))


@pytest.mark.parametrize("name", SCHEMES)
def test_afterwards_the_model_computes_as_before(model: PreTrainedModel, name: str) -> None:
    logits = _logits(model)
    tensors = {key: value.clone() for key, value in state_tensors(model).items()}
    with quantized_forward(model, SCHEMES[name]):
        inside = _logits(model)
    assert not torch.allclose(inside, logits, atol=1e-4)
    assert torch.equal(_logits(model), logits)
    assert all(torch.equal(value, tensors[key]) for key, value in state_tensors(model).items())


def test_a_failure_inside_leaves_the_model_as_it_was(model: PreTrainedModel) -> None:
    logits = _logits(model)
    with pytest.raises(ZeroDivisionError), quantized_forward(model, SCHEMES["fp8_cast_all"]):
        raise ZeroDivisionError
    assert torch.equal(_logits(model), logits)


@pytest.mark.parametrize("name", ["int8_weight", "fp8_weight", "int4"])
def test_weight_only_is_the_model_with_rounded_weights(model: PreTrainedModel, name: str) -> None:
    with quantized_forward(model, SCHEMES[name]):
        inside = _logits(model)
    _rounded(model, lambda key: "_proj.weight" in key, name)
    torch.testing.assert_close(inside, _logits(model), rtol=1e-5, atol=1e-5)


def test_cast_all_is_the_model_with_every_tensor_cast(model: PreTrainedModel) -> None:
    with quantized_forward(model, SCHEMES["fp8_cast_all"]):
        inside = _logits(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(inside, _logits(model), rtol=1e-5, atol=1e-5)


def test_scales_per_token_do_not_depend_on_the_batch(model: PreTrainedModel) -> None:
    batch = _batch()
    whole, alone = (
        quantized_logprobs(model, batch, SCHEMES["fp8_row"], microbatch_tokens=tokens)
        for tokens in (1000, 1)
    )
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-5)


def test_the_scales_of_a_token_are_those_of_the_next_sampled_one() -> None:
    batch = PackedBatch.pack(
        [array("i", [5, 6, 7]), array("i", [5, 8, 9, 8])],
        [array("b", [0, 0, 1]), array("b", [0, 1, 0, 1])],
    )
    found = scales_of_tokens(batch, torch.tensor([[1.0], [2.0], [3.0]]))
    expected = [1.0, 1.0, torch.nan, 2.0, 3.0, 3.0, torch.nan]
    torch.testing.assert_close(found[:, 0], torch.tensor(expected), equal_nan=True)


def _decode(model: PreTrainedModel, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Forced decoding behind a cache, as an engine does it: log-probs [N] and scales [N, L].

    A forward holds the tokens up to the next action, so every action has scales of its own.
    """
    names = list(block_linears(model))
    recorder = Recorder(names)
    logp = torch.empty(len(batch.action_index))
    scales = torch.empty(len(batch.action_index), len(names))

    def tap(column: int) -> RecordingTap:
        return recorder.tap((names[column],), (1,))

    with quantized_forward(model, SCHEMES["fp8"], tap=tap):
        for s in range(len(batch.lengths)):
            cache, done = DynamicCache(), int(batch.offsets[s])
            for action in batch.actions_of(torch.tensor([s])).tolist():
                end = int(batch.action_index[action])
                step = batch.token_ids[None, done:end]
                logits = model(input_ids=step, use_cache=True, **{CACHE: cache}).logits
                logp[action] = logits[0, -1].log_softmax(-1)[batch.token_ids[end]]
                scales[action] = recorder.take()
                done = end
    return logp, scales


def test_repeated_scales_reproduce_what_the_engine_computed(model: PreTrainedModel) -> None:
    batch, scheme = _batch(), SCHEMES["fp8"]
    behaviour, scales = _decode(model, batch)
    engine = action_logprobs(model, batch).logp.detach() - behaviour
    unaware = quantized_logprobs(model, batch, scheme) - behaviour
    repeated = quantized_logprobs(model, batch, scheme, scales=scales) - behaviour
    assert repeated.abs().max() < 1e-5
    assert unaware.abs().mean() > 1e-3
    assert engine.abs().mean() > 1e-3
