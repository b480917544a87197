"""A model in memory as a witness: which of its modules an MLP read from disk is, by the values of its weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from glu_probe.neurons import GatedLayer


class Witness:
    """Finds the module that holds a layer's weights, and runs it. No name of a module or tensor is used."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._found: dict[tuple[float, ...], tuple[str, int | None]] = {}
        self._vectors: dict[tuple[float, ...], str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=True):
            if parameter.ndim == 1 and len(parameter) > 2:
                self._vectors.setdefault(_key(parameter), name)
            elif parameter.ndim in (2, 3) and parameter.shape[-1] > 2 < parameter.shape[-2]:
                self._add(name, parameter.detach())

    def _add(self, name: str, parameter: Tensor) -> None:
        stacked = parameter.ndim == 3
        for number, matrix in enumerate(parameter if stacked else parameter[None]):
            for rows in (matrix, matrix.T):
                ratios = (rows[:, 1:3] / rows[:, :1]).tolist()
                for row in ratios:
                    self._found.setdefault(tuple(row), (name, number if stacked else None))

    def place(self, layer: GatedLayer) -> tuple[str, int | None]:
        """Name of the module that has all three weights of a layer, and which of its experts they are."""
        places = [self._found[_key(factor[0])] for factor in (layer.query, layer.key, layer.value)]
        owners = {_owner(name) for name, _ in places}
        assert len(owners) == 1, owners
        assert len({number for _, number in places}) == 1
        return owners.pop(), places[0][1]

    def home(self, layer: GatedLayer) -> tuple[str, int | None]:
        """Name of the module that can be run in the place of a layer, and which of its experts that is."""
        name, number = self.place(layer)
        if number is None and isinstance(layer.expert, int):  # experts below each other in one matrix
            return name.rpartition(".")[0], layer.expert
        while isinstance(self.model.get_submodule(name), nn.ModuleList):
            name = name.rpartition(".")[0]
        return name, number

    def function(self, layer: GatedLayer) -> Callable[[Tensor], Tensor]:
        """What the model's own module computes in the place of a layer."""
        name, number = self.home(layer)
        return lambda x: _run(self.model.get_submodule(name), number, x)

    def norm(self, values: Tensor) -> str:
        """Name of the module that has this vector as its weight."""
        return self._vectors[_key(values)].rpartition(".")[0]


def _key(values: Tensor) -> tuple[float, ...]:
    """A vector's direction, as ratios that powers of two leave as they are: some configs scale whole factors."""
    return tuple((values[1:3] / values[:1]).tolist())


def _owner(parameter: str) -> str:
    """The module of an MLP: two above a linear layer's weight, one above a parameter of its own."""
    parts = parameter.split(".")
    return ".".join(parts[:-2] if parts[-1] == "weight" else parts[:-1])


def _run(module: nn.Module, expert: int | None, x: Tensor) -> Tensor:
    """One MLP, or one of a module's experts with a routing weight of 1."""
    if expert is None:
        return _first(module(x[None])).reshape(x.shape)
    if hasattr(getattr(module, "router", None), "layer"):
        return _by_its_own_router(module, expert, x)
    if module.forward.__code__.co_argcount == 2:  # every expert reads its own part of the batch
        count = next(p for p in module.parameters() if p.ndim == 3).shape[0]
        return _first(module(x.repeat(count, 1))).reshape(count, *x.shape)[expert]
    others = [(expert + 1) % 2] if expert < 2 else [0]  # a second one, with weight 0: some modules want several
    index = torch.tensor([[expert, *others]]).expand(len(x), -1)
    weight = torch.tensor([[1.0, 0.0]], dtype=x.dtype).expand(len(x), -1)
    return _first(module(x, index, weight)).reshape(x.shape)


def _by_its_own_router(module: nn.Module, expert: int, x: Tensor) -> Tensor:
    """A module that routes by itself, made to choose one expert, less the constant that it adds to what experts write."""
    chosen = module.router.layer.register_forward_hook(
        lambda _, __, logits: (
            1e4 * torch.nn.functional.one_hot(torch.tensor(expert), logits.shape[-1]).expand_as(logits)
        )
    )
    try:
        return _first(module(x[None]))[0] - module.bias
    finally:
        chosen.remove()


def _first(out: Tensor | tuple) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def error(found: Tensor, expected: Tensor) -> float:
    """Distance relative to the size of what was expected."""
    return float((found - expected).norm() / expected.norm())
