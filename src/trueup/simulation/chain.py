"""Episodes of T tokens in which what came before decides: a race against a pace.

Each token moves a counter by one or leaves it. The policy reads one thing, whether the counter is
behind the pace of one move every second token, and has logits of its own for either. The reward is
1 if the counter ends at the pace or above. The target moves with probability 1/2 in both contexts,
so that about half of its episodes pass, whatever T is; a behaviour policy that gives up a little
where it is behind is further behind after many tokens, and its prefixes are no longer those of the
target.

Everything that a token needs to know of the past is the counter, so the gradient is exact by
dynamic programming over (t, counter). So is the expectation of any estimator that weights a token
by the ratios of some of the tokens before it and after it: ratios before a token give its context
the target's distribution, ratios after it give its outcome the target's continuation.

Shapes: R repeats of N episodes of T tokens; 2 contexts (behind, on pace), V tokens, of which the
first half moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trueup.simulation.estimator import Draws

CONTEXTS = 2


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The problem: episode length, who samples, who learns."""

    length: int
    """T ≥ 1."""
    policy: Tensor
    """[2, V] float32 log π."""
    behaviour: Tensor
    """[2, V] float32 log μ."""

    @cached_property
    def gradient(self) -> Tensor:
        """[2, V] exact gradient of the probability to pass."""
        return self.expected(prefix=self.policy, choice=self.policy, suffix=self.policy)

    def expected(self, *, prefix: Tensor, choice: Tensor, suffix: Tensor) -> Tensor:
        """[2, V] expectation of a weighted estimator, exact: Σ_t E[A·∇ log π(token | context)].

        Each argument is `policy` where the ratios of these tokens are in the weight, else
        `behaviour`. The baseline is the behaviour policy's pass rate.

        Args:
            prefix: [2, V] log-probs of the tokens before, which the context comes from.
            choice: [2, V] log-probs of the token itself.
            suffix: [2, V] log-probs of the tokens after, which decide the outcome.
        """
        occupancy, value = self._occupancy(prefix), self._value(suffix)
        advantage = value[1:] - self.pass_rate[1]
        rows = []
        for context in range(CONTEXTS):
            inside = self._behind if context == 0 else ~self._behind
            here = torch.where(inside, occupancy[:-1, :-1], 0.0)  # [T, T+1]
            moved, stayed = (here * advantage[:, 1:]).sum(), (here * advantage[:, :-1]).sum()
            drawn = choice[context].double().exp()
            drawn = torch.cat([drawn[: self._movers] * moved, drawn[self._movers :] * stayed])
            rows.append(drawn - self.policy[context].double().exp() * drawn.sum())
        return torch.stack(rows).float()

    @cached_property
    def pass_rate(self) -> tuple[float, float]:
        """Probability to pass, of the target and of the behaviour policy."""
        return float(self._value(self.policy)[0, 0]), float(self._value(self.behaviour)[0, 0])

    @cached_property
    def product_second_moment(self) -> float:
        """E_μ[(Π ρ)²]: 1 + χ² of whole episodes, what weights by products cost."""
        pi, mu = self.policy.double(), self.behaviour.double()
        tilted = 2 * pi - mu  # μ·ρ², which sums to more than 1
        moves = torch.where(self._behind, *tilted[:, : self._movers].exp().sum(-1))
        stays = torch.where(self._behind, *tilted[:, self._movers :].exp().sum(-1))
        weight = torch.zeros(self.length + 2, dtype=torch.float64)
        weight[0] = 1.0
        for t in range(self.length):
            here = weight[:-1]
            weight = torch.zeros_like(weight)
            weight[:-1] += here * stays[t]
            weight[1:] += here * moves[t]
        return float(weight.sum())

    def draw(self, repeats: int, samples: int, generator: torch.Generator) -> Draws:
        """Sample R step batches of N episodes from the behaviour policy."""
        shape = (repeats, samples, self.length)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        edges = self.behaviour.double().exp().cumsum(-1)[:, :-1].contiguous()  # [2, V-1]
        context = torch.empty(shape, dtype=torch.int64)
        token = torch.empty(shape, dtype=torch.int64)
        counter = torch.zeros(repeats, samples, dtype=torch.int64)
        for t in range(self.length):
            draw = uniform[..., t].contiguous()
            on_pace = 2 * counter >= t
            behind = torch.searchsorted(edges[0], draw, right=True)
            token[..., t] = torch.where(
                on_pace, torch.searchsorted(edges[1], draw, right=True), behind
            )
            context[..., t] = on_pace
            counter += token[..., t] < self._movers
        return Draws(
            context=context,
            token=token,
            target=self.policy[context, token],
            behaviour=self.behaviour[context, token],
            reward=(2 * counter >= self.length).float(),
        )

    @property
    def _movers(self) -> int:
        return self.policy.shape[1] // 2

    @property
    def _behind(self) -> Tensor:
        """[T, T+1] bool: after t tokens, counter x is behind."""
        t = torch.arange(self.length)[:, None]
        return 2 * torch.arange(self.length + 1)[None] < t

    def _moves(self, logp: Tensor) -> Tensor:
        """[T, T+1] float64: probability to move after t tokens at counter x."""
        p = logp.double().exp()[:, : self._movers].sum(-1)
        return torch.where(self._behind, p[0], p[1])

    def _occupancy(self, logp: Tensor) -> Tensor:
        """[T+1, T+2] float64: distribution of the counter after t tokens."""
        moves = self._moves(logp)
        found = torch.zeros(self.length + 1, self.length + 2, dtype=torch.float64)
        found[0, 0] = 1.0
        for t in range(self.length):
            here = found[t, :-1]
            found[t + 1, :-1] += here * (1 - moves[t])
            found[t + 1, 1:] += here * moves[t]
        return found

    def _value(self, logp: Tensor) -> Tensor:
        """[T+1, T+2] float64: probability to pass from counter x after t tokens."""
        moves = self._moves(logp)
        found = torch.zeros(self.length + 1, self.length + 2, dtype=torch.float64)
        found[-1] = (2 * torch.arange(self.length + 2) >= self.length).double()
        for t in reversed(range(self.length)):
            found[t, :-1] = moves[t] * found[t + 1, 1:] + (1 - moves[t]) * found[t + 1, :-1]
        return found


def race(
    length: int, *, slower: tuple[float, float], noise: float, tokens: int = 8, seed: int = 0
) -> Chain:
    """A chain whose sampler moves less often than the target, with noise on its logits.

    Args:
        length: T ≥ 1.
        slower: How far the sampler's log-odds of moving are below the target's, behind and on pace.
        noise: σ of the sampler's logits around that.
        tokens: V, even.
        seed: Of logits and noise.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (CONTEXTS, 2, tokens // 2)
    logits = torch.randn(shape, generator=generator)
    jitter = noise * torch.randn(shape, generator=generator)
    # Within the moving tokens and within the others: each of the two has probability 1/2.
    target = torch.log_softmax(logits, -1)
    behaviour = torch.log_softmax(logits + jitter, -1)
    behaviour[:, 0] -= torch.tensor(slower)[:, None]
    return Chain(
        length=length,
        policy=torch.log_softmax(target.flatten(1), -1),
        behaviour=torch.log_softmax(behaviour.flatten(1), -1),
    )
