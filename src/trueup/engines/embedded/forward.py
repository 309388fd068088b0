"""A slim forward for Llama, Qwen2 and Qwen3 blocks over the slot cache.

The same arithmetic as the transformers modules of these types, without their per-call overhead:
RMS norm, rotary positions, grouped-query attention (optional query-key norm and biases), SwiGLU,
tied or untied head. Linear layers run on the packed tokens of the ragged batch, so padding costs
nothing there; only the last layer's keys and values are computed for tokens that nobody samples
behind.

R: rows, M: new tokens, H: query heads, K: key-value heads, G = H/K, D: head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  the name of the field
from torch import Tensor

from trueup.engines.embedded.cache import SlotCache
from trueup.engines.embedded.memory import Arithmetic, Memory
from trueup.engines.embedded.network import Batch
from trueup.engines.embedded.parameters import Parameters
from trueup.engines.embedded.plan import Plan, Planner, Several, Singles
from trueup.engines.embedded.rotary import tables, tabulated
from trueup.models.linear import Linear
from trueup.models.load import state_tensors
from trueup.models.quantization.recording import Recorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block, ready to multiply."""

    norm_in: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    norm_mlp: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Bound:
    """The weights that are served."""

    embed: Tensor
    layers: list[_Layer]
    queries: Linear
    """Of the last layer, where only the sampled rows need them."""
    keys_values: Linear
    norm: Tensor
    head: Linear
    memory: Memory

    def tensors(self) -> Mapping[str, Tensor]:
        """See `network.Prepared`."""
        return self.memory.tensors()


class SlimNetwork:
    """The slim forward; see `network.Network`."""

    def __init__(
        self, model: PreTrainedModel, slots: int, device: torch.device, arithmetic: Arithmetic
    ) -> None:
        """Read the architecture from a model; its weights are not kept."""
        config: Any = model.config
        names = state_tensors(model)
        self._arithmetic = arithmetic
        scheme = arithmetic.scheme
        self._recorder = (
            Recorder(_linear_modules(names)) if scheme is not None and scheme.one_scale else None
        )
        self._layers_count: int = config.num_hidden_layers
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps: float = config.rms_norm_eps
        self._all_heads = self._heads + 2 * self._kv_heads
        self._scale = self._head_dim**-0.5
        self._head_name = (
            "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
        )
        self.fused = [group for group in self._groups() if all(name in names for name in group)]
        self.cache = SlotCache(
            layers=self._layers_count,
            slots=slots,
            heads=self._kv_heads,
            head_dim=self._head_dim,
            dtype=model.dtype,
            device=device,
        )
        cos, sin = tables(model, heads=self._heads + self._kv_heads, head_dim=self._head_dim)
        self._planner = Planner(
            self.cache,
            cos.to(device),
            sin.to(device),
            heads=self._heads,
            kv_heads=self._kv_heads,
            dtype=model.dtype,
        )
        self._bound: _Bound | None = None
        self._states: Tensor | None = None

    @staticmethod
    def serves(config: Any) -> bool:
        """Whether this forward computes exactly what the architecture means."""
        layer_types = getattr(config, "layer_types", None) or ["full_attention"]
        return (
            config.model_type in _MODEL_TYPES
            and tabulated(config)
            and config.hidden_act == "silu"
            and set(layer_types) == {"full_attention"}
        )

    def prepare(self, parameters: Parameters) -> _Bound:
        """See `network.Network.prepare`."""
        memory = Memory(parameters, self._arithmetic, self._recorder)
        layers = [self._prepare_layer(memory, index) for index in range(self._layers_count)]
        queries = self._heads * self._head_dim
        rows = self._all_heads * self._head_dim
        return _Bound(
            embed=memory.tensor("model.embed_tokens.weight"),
            layers=layers,
            queries=layers[-1].qkv.part(0, queries),
            keys_values=layers[-1].qkv.part(queries, rows),
            norm=memory.tensor("model.norm.weight"),
            head=memory.head(self._head_name, "lm_head.bias"),
            memory=memory,
        )

    def _prepare_layer(self, memory: Memory, index: int) -> _Layer:
        block = f"model.layers.{index}"
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        return _Layer(
            norm_in=memory.tensor(f"{block}.input_layernorm.weight"),
            qkv=memory.linear(*(f"{attention}.{name}_proj" for name in "qkv")),
            q_norm=memory.optional(f"{attention}.q_norm.weight"),
            k_norm=memory.optional(f"{attention}.k_norm.weight"),
            out=memory.linear(f"{attention}.o_proj"),
            norm_mlp=memory.tensor(f"{block}.post_attention_layernorm.weight"),
            gate_up=memory.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=memory.linear(f"{mlp}.down_proj"),
        )

    def bind(self, prepared: _Bound) -> None:
        """See `network.Network.bind`."""
        self._bound = prepared

    def copy(self, source: int, target: int, length: int) -> int:
        """See `network.Network.copy`."""
        self.cache.copy(source, target, length)
        return length

    def keep(self, slot: int, length: int) -> int:
        """See `network.Network.keep`; positions behind `length` are masked until overwritten."""
        return length

    def clear(self, slot: int) -> None:
        """See `network.Network.clear`."""
        self.cache.clear(slot)

    def close(self) -> None:
        """See `network.Network.close`."""
        self._bound, self.cache.layers = None, []

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """See `network.Network.forward`."""
        bound = self._bound
        assert bound is not None, "bind comes before forward"
        plan = self._planner.plan(batch)
        x = F.embedding(plan.tokens, bound.embed)
        for index, layer in enumerate(bound.layers):
            normed = self._rms(x, layer.norm_in)
            if plan.last is not None and index == self._layers_count - 1:
                attended = self._attend_last(bound, layer, normed, plan)
                x = x.index_select(0, plan.last.index)
            else:
                attended = self._attend(index, layer, normed, plan)
            x = layer.out.add(x, attended)
            gate, up = layer.gate_up(self._rms(x, layer.norm_mlp)).chunk(2, -1)
            x = layer.down.add(x, F.silu(gate).mul_(up))
        normed = self._rms(x, bound.norm)
        self._states = None if plan.known is None else normed.index_select(0, plan.known)
        return self.logits(normed if plan.outputs is None else normed.index_select(0, plan.outputs))

    def states(self) -> Tensor | None:
        """See `network.Network.states`."""
        return self._states

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """See `network.Network.logits`."""
        assert self._bound is not None, "bind comes before forward"
        return self._bound.head(states.to(self._arithmetic.head_dtype)).float()

    def scales(self) -> Tensor | None:
        """See `network.Network.scales`."""
        return None if self._recorder is None else self._recorder.take()

    def _attend(self, index: int, layer: _Layer, x: Tensor, plan: Plan) -> Tensor:
        """[M, hidden] -> [M, H·D]."""
        qkv = self._rotated(layer, layer.qkv(x), plan.cos, plan.sin, 0)
        self._write(index, qkv[:, self._heads :], plan)
        parts = []
        if plan.singles is not None:
            end = plan.several[0].begin if plan.several else len(qkv)
            parts.append(self._attend_singles(index, qkv[:end, : self._heads], plan.singles))
        parts += [self._attend_several(index, qkv[r.begin : r.end], r) for r in plan.several]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_last(self, bound: _Bound, layer: _Layer, x: Tensor, plan: Plan) -> Tensor:
        """[M, hidden] -> [R, H·D]: keys and values of all tokens, queries of the last ones."""
        last = plan.last
        assert last is not None
        index = self._layers_count - 1
        states = self._rotated(layer, bound.keys_values(x), plan.cos, plan.sin, self._heads)
        self._write(index, states, plan)
        queries = bound.queries(x.index_select(0, last.index))
        queries = self._rotated(layer, queries, last.cos, last.sin, 0)
        return self._attend_singles(index, queries, last.queries)

    def _rotated(
        self, layer: _Layer, projected: Tensor, cos: Tensor, sin: Tensor, first: int
    ) -> Tensor:
        """[M, heads·D] -> [M, heads, D]: the heads from `first` on, normed and rotated in place.

        The heads are the H query heads, the K key heads and the K value heads, in this order.
        """
        states = projected.view(len(projected), -1, self._head_dim)
        end = first + states.shape[1]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = states[:, : max(self._heads - first, 0)]
            keys = states[:, queries.shape[1] : self._heads + self._kv_heads - first]
            queries.copy_(self._rms(queries, layer.q_norm))
            keys.copy_(self._rms(keys, layer.k_norm))
        turning = states[:, : self._heads + self._kv_heads - first]
        rolled = turning.roll(self._head_dim // 2, -1)
        turning.mul_(cos[:, first:end]).addcmul_(rolled, sin[:, first:end])
        return states

    def _write(self, index: int, keys_values: Tensor, plan: Plan) -> None:
        self.cache.write(index, plan.write, keys_values.reshape(-1, self._head_dim))

    def _attend_singles(self, index: int, queries: Tensor, rows: Singles) -> Tensor:
        """[rows, H, D] -> [rows, H·D]: the G query heads of a group are the rows of a product."""
        if rows.slots is not None:
            keys, values = self.cache.read(index, rows.slots, rows.attended)
        else:
            keys, values = self.cache.layers[index][:, : rows.rows, :, : rows.attended]
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        if rows.order is not None:
            queries = queries.index_select(0, rows.order)
        groups = self._heads // self._kv_heads
        grouped = queries.reshape(rows.rows * self._kv_heads, groups, self._head_dim)
        scores = torch.baddbmm(rows.mask, grouped, keys.transpose(1, 2), alpha=self._scale)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        mixed = torch.bmm(weights, values).view(rows.rows, -1)
        return mixed if rows.inverse is None else mixed.index_select(0, rows.inverse)

    def _attend_several(self, index: int, qkv: Tensor, rows: Several) -> Tensor:
        """[tokens, H+2K, D] -> [tokens, H·D]: rows padded to the longest, each seeing its past."""
        if rows.pad is not None:
            qkv = qkv.flatten(1).index_select(0, rows.pad)
        padded = qkv.view(rows.rows, -1, self._all_heads, self._head_dim).transpose(1, 2)
        queries, keys, values = torch.split(
            padded, [self._heads, self._kv_heads, self._kv_heads], 1
        )
        if rows.slots is not None:
            keys, values = self.cache.read(index, rows.slots, rows.attended)
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=rows.mask,
            is_causal=rows.mask is None,
            scale=self._scale,
            enable_gqa=self._heads != self._kv_heads,
        )
        packed = mixed.transpose(1, 2).reshape(-1, self._heads * self._head_dim)
        return packed if rows.unpad is None else packed.index_select(0, rows.unpad)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """Statistics in float32, weight applied in the model's dtype, as the modules do it."""
        wide = x.float()
        norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(self._eps).rsqrt_()
        normed: Tensor = (wide * scale).to(x.dtype).mul_(weight)
        return normed

    def _groups(self) -> list[tuple[str, ...]]:
        """What one product computes: queries, keys and values; the gate and what it gates."""
        return [
            tuple(f"model.layers.{index}.{part}_proj.{kind}" for part in parts)
            for index in range(self._layers_count)
            for parts in (
                ("self_attn.q", "self_attn.k", "self_attn.v"),
                ("mlp.gate", "mlp.up"),
            )
            for kind in ("weight", "bias")
        ]


def _linear_modules(names: Iterable[str]) -> list[str]:
    """The blocks' linear layers, in the order of the model's modules."""
    return [name.removesuffix(".weight") for name in names if name.endswith("_proj.weight")]
