"""An independent way to break gated MLPs: transformers alone, hooks on its projections, formulas written out in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .tiny_models import build

# New coefficients from a, b, the activation and what a calibration found: c, linear, product, scale, mean.
FORMULAS: dict[str, Callable[..., Tensor]] = {
    "identity": lambda a, b, act, fit: act(a) * b,
    "exchange": lambda a, b, act, fit: act(fit["c"] * b) * a / fit["c"],
    "exchange_raw": lambda a, b, act, fit: act(b) * a,
    "rescale_half": lambda a, b, act, fit: 2 * act(a / 2) * b,
    "rescale_double": lambda a, b, act, fit: act(2 * a) * b / 2,
    "symmetrised": lambda a, b, act, fit: (act(a) * b + act(fit["c"] * b) * a / fit["c"]) / 2,
    "bilinear_fit": lambda a, b, act, fit: fit["linear"] * b + fit["product"] * a * b,
    "symmetric_fit": lambda a, b, act, fit: fit["scale"] * act(a * b * fit["c"]),
    "mean_ablation": lambda a, b, act, fit: fit["mean"] + 0 * a,
    "zero_ablation": lambda a, b, act, fit: 0 * a,
}


class Plain:
    """A tiny model of transformers and its gated MLPs."""

    def __init__(self, name: str) -> None:
        self.name, self.model = name, build(name)
        self.model.set_attn_implementation("eager")

    def mlp(self, layer: int) -> torch.nn.Module:
        block = self.model.model.layers[layer]
        mlp = block.feed_forward if self.name == "falcon_h1" else block.mlp
        for shared in ("shared_expert", "shared_experts"):
            mlp = getattr(mlp, shared, mlp)
        return mlp

    def act(self, layer: int) -> Callable[[Tensor], Tensor]:
        mlp = self.mlp(layer)
        return getattr(mlp, "act_fn", None) or mlp.activation_fn

    @contextlib.contextmanager
    def _at(self, layer: int, shape: torch.Size, change: Callable[[Tensor, Tensor, Tensor], Tensor]):
        """Let `change` say what a layer's down projection gets, from a, b and what it would get, [batch, position, d_mlp]."""
        mlp, held = self.mlp(layer), {}
        multiplier = 0.5 if self.name == "falcon_h1" else 1.0

        def keep(name: str) -> Callable:
            return lambda module, args, output: held.update({name: output.reshape(*shape, -1)})

        def replace(module, args):
            (found,) = args
            if "both" in held:
                held["a"], held["b"] = held["both"].chunk(2, dim=-1)
            new = change(held["a"] * multiplier, held["b"], found.reshape(*shape, -1))
            return (new.to(found).reshape(found.shape),)

        parts = {"both": "gate_up_proj"} if hasattr(mlp, "gate_up_proj") else {"a": "gate_proj", "b": "up_proj"}
        handles = [getattr(mlp, module).register_forward_hook(keep(name)) for name, module in parts.items()]
        handles.append(mlp.down_proj.register_forward_pre_hook(replace))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def branches(self, layer: int, sequences: list[Tensor], first: int) -> tuple[Tensor, Tensor]:
        """a and b of all positions from `first` on, [token, d_mlp] float64."""
        found: list[tuple[Tensor, Tensor]] = []

        def look(a: Tensor, b: Tensor, coefficients: Tensor) -> Tensor:
            found.append((a[0, first:].double(), b[0, first:].double()))
            return coefficients

        for ids in sequences:
            with self._at(layer, ids[None].shape, look):
                self.model(ids[None])
        return tuple(torch.cat(branch) for branch in zip(*found, strict=True))

    def fit(self, layer: int, sequences: list[Tensor], first: int) -> dict[str, Tensor]:
        """The gauge, and least-squares fits neuron by neuron."""
        (a, b), act = self.branches(layer, sequences, first), self.act(layer)
        c = (a.square().mean(0) / b.square().mean(0)).sqrt() * torch.where((a * b).mean(0) < 0, -1.0, 1.0)
        g, linear, product, scale = act(a) * b, [], [], []
        for j in range(a.shape[1]):
            design = torch.stack([b[:, j], a[:, j] * b[:, j]], dim=1).numpy()
            solution = np.linalg.lstsq(design, g[:, j].numpy(), rcond=None)[0]
            linear.append(solution[0])
            product.append(solution[1])
            scale.append(np.linalg.lstsq(act(a * b * c)[:, j, None].numpy(), g[:, j].numpy(), rcond=None)[0][0])
        fits = {"linear": linear, "product": product, "scale": scale}
        return {"c": c, "mean": g.mean(0), **{name: torch.tensor(values) for name, values in fits.items()}}

    @torch.no_grad()
    def log_probabilities(
        self,
        ids: Tensor,
        edits: dict[int, tuple[str, dict[str, Tensor]]],
        first: int,
        masks: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """[position, vocabulary] float64 of one sequence, layers edited by name and fit, neurons of the masks only."""
        with contextlib.ExitStack() as stack:
            for layer, (name, fit) in edits.items():

                def change(a, b, coefficients, layer=layer, name=name, fit=fit):
                    new = FORMULAS[name](a.double(), b.double(), self.act(layer), fit)
                    new[:, :first] = coefficients[:, :first].double()
                    return new if masks is None else torch.where(masks[layer], new, coefficients.double())

                stack.enter_context(self._at(layer, ids[None].shape, change))
            return self.model(ids[None]).logits[0].double().log_softmax(-1)

    def costs(self, sequences: list[Tensor], edits: dict, first: int, masks: dict | None = None) -> dict[str, float]:
        """Means over all tokens and standard errors over sequences of equal length."""
        losses, divergences = [], []
        for ids in sequences:
            clean, changed = (self.log_probabilities(ids, one, first, masks) for one in ({}, edits))
            at = torch.arange(len(ids) - 1), ids[1:]
            losses.append((clean[:-1][at] - changed[:-1][at]).mean().item())
            divergences.append((clean.exp() * (clean - changed)).sum(-1).mean().item())
        out = {}
        for name, values in (("delta_loss", losses), ("kl", divergences)):
            out[name] = float(np.mean(values))
            out[f"{name}_se"] = float(np.std(values, ddof=1) / np.sqrt(len(values)))
        return out
