"""A decoder-only transformer small enough for one CPU core, whose MLP is any form of `glu_probe.forms`.

Pre-norm with RMSNorm, rotary positions, untied embedding and head. Two models of the same seed have the same weights
everywhere but in their MLPs, and are trained on the same batches in the same order, so that their losses are a pair.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from text_splits import Corpus
from torch import Tensor, nn
from torch.nn import functional

from glu_probe.forms import BilinearAttentionMLP, GatedMLP, MLPForm, RankOneBilinearMLP, StandardMLP


@dataclass(frozen=True)
class FormSpec:
    """Which MLP: a class of `glu_probe.forms`, its s, and its rank where the class has one."""

    kind: type[MLPForm]
    activation: str
    rank: int | None = None

    def build(self, d_model: int, parameters: int, **options) -> MLPForm:
        """The form with as many neurons as come closest to a number of parameters."""
        extra = {} if self.rank is None else {"rank": self.rank}
        neuron = self.kind(d_model, 1, self.activation, **extra, device="meta").parameter_count
        return self.kind(d_model, max(1, round(parameters / neuron)), self.activation, **extra, **options)


SPECS: dict[str, FormSpec] = {
    "standard gelu": FormSpec(StandardMLP, "gelu"),
    "bilinear": FormSpec(RankOneBilinearMLP, "linear"),
    "rank-1 silu": FormSpec(RankOneBilinearMLP, "silu"),
    "rank-1 relu": FormSpec(RankOneBilinearMLP, "relu"),
    "gated silu": FormSpec(GatedMLP, "silu"),
    "gated gelu": FormSpec(GatedMLP, "gelu"),
    "gated relu": FormSpec(GatedMLP, "relu"),
    "rank-2 bilinear": FormSpec(BilinearAttentionMLP, "linear", rank=2),
    "rank-4 bilinear": FormSpec(BilinearAttentionMLP, "linear", rank=4),
}


@dataclass(frozen=True)
class Recipe:
    """Everything that is equal for all forms.

    Attributes:
        d_model, layers, heads, context: sizes of the model.
        vocabulary: of the tokenizer.
        batch: sequences of a step.
        warmup: share of the steps in which the learning rate rises; it then falls to 0 as a cosine.
        decay: weight decay of AdamW, on everything but the norms' gains.
        clip: largest norm of a gradient.
    """

    d_model: int = 96
    layers: int = 2
    heads: int = 3
    context: int = 128
    vocabulary: int = 1024
    batch: int = 8
    warmup: float = 0.05
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    @property
    def mlp_parameters(self) -> int:
        """What every MLP has, as nearly as whole neurons allow: that of a standard one with 4 d_model of them."""
        return 8 * self.d_model**2


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, recipe: Recipe, generator: torch.Generator) -> None:
        super().__init__()
        width = recipe.d_model
        self.heads = recipe.heads
        self.inward = nn.Parameter(torch.randn(3 * width, width, generator=generator) * width**-0.5)
        scale = (width * 2 * recipe.layers) ** -0.5
        self.outward = nn.Parameter(torch.randn(width, width, generator=generator) * scale)

    def forward(
        self,
        x: Float[Tensor, "batch token d_model"],
        cos: Float[Tensor, "token half"],
        sin: Float[Tensor, "token half"],
    ) -> Float[Tensor, "batch token d_model"]:
        """What every position takes from itself and those before it."""
        batch, length, width = x.shape
        query, key, value = (
            functional.linear(x, self.inward).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(
            rotated(query, cos, sin), rotated(key, cos, sin), value, is_causal=True
        )
        return functional.linear(mixed.transpose(1, 2).reshape(batch, length, width), self.outward)


def rotated(
    x: Float[Tensor, "batch head token width"], cos: Float[Tensor, "token half"], sin: Float[Tensor, "token half"]
) -> Float[Tensor, "batch head token width"]:
    """Rotary positions: coordinates i and i + width/2 turned by an angle proportional to the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """Attention and an MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, recipe: Recipe, mlp: MLPForm, generator: torch.Generator) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(recipe.d_model)
        self.attention = Attention(recipe, generator)
        self.mlp_norm = nn.RMSNorm(recipe.d_model)
        self.mlp = mlp

    def forward(self, x: Float[Tensor, "batch token d_model"], cos: Tensor, sin: Tensor) -> Tensor:
        """The residual stream after the block."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class SmallTransformer(nn.Module):
    """The model; the MLPs draw from a stream of their own, so that everything else is the same for every form."""

    def __init__(self, recipe: Recipe, spec: FormSpec, vocabulary: int, seed: int) -> None:
        super().__init__()
        shared, own = (torch.Generator().manual_seed(s) for s in _streams(seed)[:2])
        width = recipe.d_model
        self.embedding = nn.Parameter(torch.randn(vocabulary, width, generator=shared))
        self.head = nn.Parameter(torch.randn(vocabulary, width, generator=shared) * width**-0.5)
        self.norm = nn.RMSNorm(width)
        self.blocks = nn.ModuleList(Block(recipe, initial_mlp(recipe, spec, own), shared) for _ in range(recipe.layers))
        half = width // recipe.heads // 2
        angles = torch.outer(torch.arange(recipe.context), 10_000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Int[Tensor, "batch token"]) -> Float[Tensor, "batch token vocabulary"]:
        """Logits of the next token, at every position."""
        length = tokens.shape[1]
        x = functional.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return functional.linear(self.norm(x), self.head)

    def loss(self, windows: Int[Tensor, "batch token"], reduction: str = "mean") -> Tensor:
        """Cross-entropy of every token of the windows but the first, in nats."""
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def initial_mlp(recipe: Recipe, spec: FormSpec, generator: torch.Generator) -> MLPForm:
    """A random MLP whose output on Gaussian input has mean square 1 / (2 layers), whatever the form.

    Without that, forms would differ by how loud they start: E[s(ab)^2] and E[(s(a) b)^2] are not the same number.
    """
    mlp = spec.build(recipe.d_model, recipe.mlp_parameters)
    mlp.reset_parameters(generator)
    sample = torch.randn(1024, recipe.d_model, generator=generator)
    mlp.value *= (2 * recipe.layers * mlp(sample).square().mean()) ** -0.5
    return mlp


def _streams(seed: int) -> list[int]:
    """Seeds of the shared weights, of the MLPs' weights and of the order of the data."""
    return [int(state) for state in np.random.SeedSequence(seed).generate_state(3)]


def window_starts(length: int, recipe: Recipe, steps: int, seed: int) -> Int[np.ndarray, "step batch"]:
    """Where every training window begins; the same for all forms of a seed.

    Windows tile the text from a random offset, an epoch after the other, each in a new order.
    """
    rng = np.random.default_rng(_streams(seed)[2])
    starts: list[np.ndarray] = []
    while sum(map(len, starts)) < steps * recipe.batch:
        tiles = np.arange(rng.integers(recipe.context), length - recipe.context, recipe.context)
        starts.append(rng.permutation(tiles))
    return np.concatenate(starts)[: steps * recipe.batch].reshape(steps, recipe.batch)


def rate_factor(step: int, steps: int, warmup: float) -> float:
    """Learning rate of a step as a share of the peak: a linear rise, then a cosine to 0."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


@torch.no_grad()
def evaluate(model: SmallTransformer, tokens: Int[np.ndarray, " token"], recipe: Recipe) -> float:
    """Mean loss in nats per token over windows that tile the tokens; a last incomplete window is left out."""
    starts = range(0, len(tokens) - recipe.context, recipe.context)
    windows = torch.from_numpy(np.stack([tokens[start : start + recipe.context + 1] for start in starts]))
    total = sum(model.loss(part, reduction="sum").item() for part in windows.split(32))
    return total / (len(windows) * recipe.context)


@dataclass(frozen=True)
class Training:
    """How a training went.

    Attributes:
        losses: training loss of every step, in nats; shorter than the steps if it diverged.
        gradient_norms: before clipping, of every step.
        seconds: of the steps alone.
    """

    losses: list[float]
    gradient_norms: list[float]
    seconds: float

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite; the training ended there."""
        return not math.isfinite(self.losses[-1])


def train(
    model: SmallTransformer,
    corpus: Corpus,
    recipe: Recipe,
    *,
    rate: float,
    steps: int,
    seed: int,
    at_step: Callable[[int], None] = lambda step: None,
) -> Training:
    """Train a model in place with AdamW, on the corpus' training part.

    Args:
        rate: peak learning rate.
        seed: of the order of the data.
        at_step: called before every step and once after the last, for measuring.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=recipe.betas, fused=True)
    tokens = corpus.tokens["train"]
    offsets = np.arange(recipe.context + 1)
    losses, norms, seconds = [], [], 0.0
    for step, starts in enumerate(window_starts(len(tokens), recipe, steps, seed)):
        at_step(step)
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_factor(step, steps, recipe.warmup)
        loss = model.loss(torch.from_numpy(tokens[starts[:, None] + offsets]))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return Training(losses, norms, seconds)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip).item())
        optimizer.step()
        seconds += time.perf_counter() - begun
    at_step(steps)
    return Training(losses, norms, seconds)
