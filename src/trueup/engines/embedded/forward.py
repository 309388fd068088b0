"""A slim forward for Llama, Qwen2 and Qwen3 blocks over the slot cache.

The same arithmetic as the transformers modules of these types, without their per-call overhead:
RMS norm, rotary positions, grouped-query attention (optional query-key norm and biases), SwiGLU,
tied or untied head. Linear layers run on the packed tokens of the ragged batch, so padding costs
nothing there; only the last layer's keys and values are computed for tokens that nobody samples
behind.

R: rows, M: new tokens, H: query heads, K: key-value heads, G = H/K, D: head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  the name of the field
from torch import Tensor

from trueup.engines.embedded.cache import SlotCache
from trueup.engines.embedded.network import Batch
from trueup.engines.embedded.parameters import Parameters
from trueup.engines.embedded.plan import Plan, Planner, Several, Singles
from trueup.engines.embedded.rotary import tables, tabulated
from trueup.models.load import state_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one block; fused ones are views of the parameters' own storage."""

    norm_in: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm_mlp: Tensor
    gate: Tensor
    gate_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Bound:
    """The weights that are served."""

    embed: Tensor
    layers: list[_Layer]
    norm: Tensor
    head: Tensor
    head_bias: Tensor | None


class SlimNetwork:
    """The slim forward; see `network.Network`."""

    def __init__(self, model: PreTrainedModel, slots: int, device: torch.device) -> None:
        """Read the architecture from a model; its weights are not kept."""
        config: Any = model.config
        names = state_tensors(model)
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

    def bind(self, parameters: Parameters) -> None:
        """See `network.Network.bind`."""
        get, fused = parameters.named.get, parameters.fused
        layers = []
        for index in range(self._layers_count):
            block = f"model.layers.{index}"
            attention, mlp = f"{block}.self_attn", f"{block}.mlp"
            layers.append(
                _Layer(
                    norm_in=parameters.named[f"{block}.input_layernorm.weight"],
                    qkv=fused[f"{attention}.q_proj.weight"],
                    qkv_bias=fused.get(f"{attention}.q_proj.bias"),
                    q_norm=get(f"{attention}.q_norm.weight"),
                    k_norm=get(f"{attention}.k_norm.weight"),
                    out=parameters.named[f"{attention}.o_proj.weight"],
                    out_bias=get(f"{attention}.o_proj.bias"),
                    norm_mlp=parameters.named[f"{block}.post_attention_layernorm.weight"],
                    gate=parameters.named[f"{mlp}.gate_proj.weight"],
                    gate_bias=get(f"{mlp}.gate_proj.bias"),
                    up=parameters.named[f"{mlp}.up_proj.weight"],
                    up_bias=get(f"{mlp}.up_proj.bias"),
                    down=parameters.named[f"{mlp}.down_proj.weight"],
                    down_bias=get(f"{mlp}.down_proj.bias"),
                )
            )
        self._bound = _Bound(
            embed=parameters.named["model.embed_tokens.weight"],
            layers=layers,
            norm=parameters.named["model.norm.weight"],
            head=parameters.named[self._head_name],
            head_bias=get("lm_head.bias"),
        )

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
                attended = self._attend_last(index, layer, normed, plan)
                x = x.index_select(0, plan.last.index)
            else:
                attended = self._attend(index, layer, normed, plan)
            x = _add_linear(x, attended, layer.out, layer.out_bias)
            normed = self._rms(x, layer.norm_mlp)
            gate = F.silu(F.linear(normed, layer.gate, layer.gate_bias))
            up = F.linear(normed, layer.up, layer.up_bias)
            x = _add_linear(x, gate.mul_(up), layer.down, layer.down_bias)
        return F.linear(self._rms(x, bound.norm), bound.head, bound.head_bias).float()

    def _attend(self, index: int, layer: _Layer, x: Tensor, plan: Plan) -> Tensor:
        """[M, hidden] -> [M, H·D]."""
        qkv = self._rotated(layer, x, plan.cos, plan.sin, 0, self._all_heads)
        self._write(index, qkv[:, self._heads :], plan)
        parts = []
        if plan.singles is not None:
            end = plan.several[0].begin if plan.several else len(qkv)
            parts.append(self._attend_singles(index, qkv[:end, : self._heads], plan.singles))
        parts += [self._attend_several(index, qkv[r.begin : r.end], r) for r in plan.several]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_last(self, index: int, layer: _Layer, x: Tensor, plan: Plan) -> Tensor:
        """[M, hidden] -> [R, H·D]: keys and values of all tokens, queries of the last ones."""
        last = plan.last
        assert last is not None
        heads = self._heads
        keys_values = self._rotated(layer, x, plan.cos, plan.sin, heads, self._all_heads)
        self._write(index, keys_values, plan)
        x = x.index_select(0, last.index)
        queries = self._rotated(layer, x, last.cos, last.sin, 0, heads)
        return self._attend_singles(index, queries, last.queries)

    def _rotated(
        self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, first: int, end: int
    ) -> Tensor:
        """[M, hidden] -> [M, end - first, D]: projections to some heads, normed and rotated.

        The heads are the H query heads, the K key heads and the K value heads, in this order.
        """
        rows = slice(first * self._head_dim, end * self._head_dim)
        bias = None if layer.qkv_bias is None else layer.qkv_bias[rows]
        states = F.linear(x, layer.qkv[rows], bias).view(-1, end - first, self._head_dim)
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
        """Query, key and value of every layer: one product, whose rows the rotation then shares."""
        return [
            tuple(f"model.layers.{index}.self_attn.{p}_proj.{kind}" for p in "qkv")
            for index in range(self._layers_count)
            for kind in ("weight", "bias")
        ]


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Residual + x Wᵀ (+ bias) in one product."""
    total = torch.addmm(residual, x, weight.t())
    return total if bias is None else total.add_(bias)
