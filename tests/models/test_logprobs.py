from array import array
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trueup.errors import CheckpointError
from trueup.models.load import state_tensors
from trueup.models.logprobs import action_logprobs, verify_head
from trueup.models.packed import PackedBatch
from trueup.models.tiny import build_tiny

VOCAB = 29


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _sharp(model: PreTrainedModel) -> PreTrainedModel:
    """Weights far from the flat start, so that a wrong position or temperature shows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def _batch(lengths: tuple[int, ...] = (3, 17, 1, 9, 17, 30)) -> PackedBatch:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    flags = [[0, *torch.randint(2, (n - 1,), generator=generator).tolist()] for n in lengths]
    return PackedBatch.pack([array("i", row) for row in ids], [array("b", row) for row in flags])


def _naive(model: PreTrainedModel, batch: PackedBatch, temperature: float) -> Tensor:
    """Segment by segment, the whole log-softmax, in the model's own dtype: [N]."""
    found = []
    for start, stop in pairwise(batch.offsets.tolist()):
        ids = batch.token_ids[start:stop]
        logp = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        found += [
            logp[position - start - 1, batch.token_ids[position]]
            for position in batch.action_index.tolist()
            if start <= position < stop
        ]
    return torch.stack(found)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probs_are_those_of_the_whole_softmax_in_float64(temperature: float):
    model, batch = _sharp(build_tiny(VOCAB, seed=0)), _batch()
    found = action_logprobs(model, batch, temperature=temperature).logp
    assert found.dtype == torch.float32
    exact = _naive(model.double(), batch, temperature)
    assert (found.double() - exact).abs().max() <= 1e-5


@pytest.mark.parametrize("microbatch_tokens", [1, 20, 60, 8192])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 512])
def test_neither_micro_batches_nor_chunks_change_a_score(microbatch_tokens: int, chunk_tokens: int):
    model, batch = _sharp(build_tiny(VOCAB, seed=0)).double(), _batch()
    whole = action_logprobs(model, batch, entropy=True)
    parts = action_logprobs(
        model,
        batch,
        microbatch_tokens=microbatch_tokens,
        chunk_tokens=chunk_tokens,
        entropy=True,
    )
    torch.testing.assert_close(parts.logp, whole.logp, rtol=0, atol=1e-6)
    torch.testing.assert_close(parts.entropy, whole.entropy, rtol=0, atol=1e-6)


def test_the_order_of_segments_carries_through():
    model, batch = _sharp(build_tiny(VOCAB, seed=0)), _batch()
    order = torch.tensor([4, 0, 5, 1, 3, 2])
    moved = action_logprobs(model, batch.select(order)).logp
    torch.testing.assert_close(
        moved, action_logprobs(model, batch).logp[batch.actions_of(order)], rtol=0, atol=1e-5
    )


def test_gradients_are_those_of_the_naive_loss():
    model, batch = _sharp(build_tiny(VOCAB, seed=0)).double(), _batch()
    weights = torch.randn(len(batch.action_index), generator=torch.Generator().manual_seed(2))
    gradients = []
    for logp in (
        action_logprobs(model, batch, temperature=0.7, microbatch_tokens=40, chunk_tokens=7).logp,
        _naive(model, batch, 0.7),
    ):
        model.zero_grad()
        (logp * weights).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for ours, naive in zip(*gradients, strict=True):
        # the loss is in float32 on our side, the graph below it in float64
        torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-6)


def test_bfloat16_rounds_the_layers_but_neither_head_nor_weights():
    model, batch = _sharp(build_tiny(VOCAB, seed=0)), _batch()
    head = _RecordingHead(model.lm_head)
    exact = action_logprobs(model, batch).logp
    model.set_output_embeddings(head)
    logp = action_logprobs(model, batch, dtype=torch.bfloat16).logp
    assert head.dtypes == {torch.float32}
    # bfloat16 has 8 bits: off by more than float32 would be, and by less than a few per cent
    assert 1e-4 < (logp - exact).abs().max() < 0.2
    logp.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_entropy_is_that_of_the_tempered_softmax_and_carries_no_gradient():
    model, batch = _sharp(build_tiny(VOCAB, seed=0)).double(), _batch((4,))
    scores = action_logprobs(model, batch, temperature=0.7, entropy=True)
    logp = (model(input_ids=batch.token_ids[None]).logits[0] / 0.7).log_softmax(-1)
    exact = -(logp.exp() * logp).sum(-1)[batch.action_index - 1]
    torch.testing.assert_close(scores.entropy, exact.float(), rtol=1e-5, atol=1e-6)
    assert not scores.entropy.requires_grad
    assert action_logprobs(model, batch).entropy is None


class _RecordingHead(nn.Module):
    """An LM head that notes how many rows it was asked for at once."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.rows: list[int] = []
        self.dtypes: set[torch.dtype] = set()

    def forward(self, states: Tensor) -> Tensor:
        self.rows.append(len(states))
        self.dtypes.add(states.dtype)
        return self.head(states)


def test_the_head_sees_action_positions_only_and_never_more_than_a_chunk():
    model, batch = build_tiny(VOCAB, seed=0), _batch()
    head = _RecordingHead(model.lm_head)
    model.set_output_embeddings(head)
    logp = action_logprobs(model, batch, chunk_tokens=4).logp
    assert max(head.rows) == 4
    assert sum(head.rows) == len(batch.action_index)
    logp.sum().backward()
    assert max(head.rows) == 4
    assert sum(head.rows) == 2 * len(batch.action_index), "backward computes each chunk once more"


def test_no_tensor_of_all_actions_by_the_vocabulary_is_kept_for_backward():
    model, batch = build_tiny(VOCAB, seed=0), _batch((40,) * 8)
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        action_logprobs(model, batch, chunk_tokens=16)
    weights = {tuple(parameter.shape) for parameter in model.parameters()}
    assert saved
    assert not [s for s in saved if s and s[-1] == VOCAB and s not in weights]


def test_a_batch_without_actions_has_no_scores():
    batch = PackedBatch.pack([array("i", [1, 2])], [array("b", [0, 0])])
    scores = action_logprobs(build_tiny(VOCAB, seed=0), batch, entropy=True)
    assert scores.logp.shape == scores.entropy.shape == (0,)


def test_bfloat16_logits_are_normalised_in_float32():
    model, batch = _sharp(build_tiny(VOCAB, seed=0)).bfloat16(), _batch()
    found = action_logprobs(model, batch, microbatch_tokens=1).logp
    expected = []
    for start, stop in pairwise(batch.offsets.tolist()):
        ids = batch.token_ids[start:stop]
        logp = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        inside = batch.action_index[(batch.action_index >= start) & (batch.action_index < stop)]
        expected.append(logp[inside - start - 1, batch.token_ids[inside]])
    # one rounding of bfloat16 at logits below 8 is 2^-6; float32 normalisation adds nothing to it
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=2**-4)


_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    "model",
    [
        Qwen2ForCausalLM(Qwen2Config(**_SMALL, tie_word_embeddings=True)),
        GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2)),
    ],
    ids=["qwen2-tied", "gpt2"],
)
def test_other_architectures_are_scored_by_the_same_function(model: PreTrainedModel):
    model, batch = _sharp(model).double(), _batch()
    verify_head(model)
    torch.testing.assert_close(
        action_logprobs(model, batch).logp, _naive(model, batch, 1.0).float(), rtol=0, atol=1e-6
    )
    assert "lm_head.weight" not in state_tensors(model)


def test_a_model_that_caps_its_logits_is_refused():
    model = Gemma2ForCausalLM(Gemma2Config(**_SMALL, head_dim=8, final_logit_softcapping=0.1))
    with pytest.raises(CheckpointError, match="linear head"):
        verify_head(_sharp(model))
