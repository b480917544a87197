"""From one MLP's tensors to its factors: halves, orientation, dtype, and the fold of the norm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ..errors import IncompleteTriple, LayoutUnknown, ShapeMismatch
from ..neurons import GatedLayer
from .families import GGUF_NORMS, FusedOrder, Norm
from .layout import Inventory, Site
from .memory import Room, fresh, gather, gather_transposed
from .rules import Options, TowerRules
from .source import TensorSource


class FactorReader:
    """Reads one site at a time and makes a `GatedLayer` of it."""

    def __init__(self, source: TensorSource, inventory: Inventory, options: Options, *, gguf: bool) -> None:
        self._source, self._inventory, self._options, self._gguf = source, inventory, options, gguf

    def norm_tensors(self, site: Site, rules: TowerRules) -> dict[str, str]:
        """Names of the norm tensors that the options fold in: roles "norm", "norm_bias", "post_norm".

        Raises:
            IncompleteTriple, ShapeMismatch, LayoutUnknown: one is absent, has another width, or is not foreseen.
        """
        wanted = {}
        if rules.norm is not None and self._options.fold_norm:
            if rules.norm.weight != "none":
                wanted["norm"] = self._norm_name(site, rules.norm, "weight")
            if rules.norm.bias:
                wanted["norm_bias"] = self._norm_name(site, rules.norm, "bias")
            elif (bias := self._beside(site, rules.norm, "bias")) is not None:
                raise LayoutUnknown(
                    f"{bias!r} is a bias that the rules of family {rules.name!r} do not know",
                    where=site.where,
                    hint="Another family's rules may apply (--family); --no-fold-norm measures without the norm",
                )
        if rules.post_norm is not None and self._options.fold_post_norm:
            wanted["post_norm"] = self._norm_name(site, rules.post_norm, "weight")
        return wanted

    def load(self, site: Site, rules: TowerRules, room: Room = fresh) -> GatedLayer:
        """Read one MLP into the given room. All of it in float32, or in float64 where a matrix of it is that."""
        matrices = {self._source.infos()[site.tensors[role]].dtype for role in ("gate", "up", "down")}
        dtype = torch.float64 if "F64" in matrices else torch.float32
        gate, up = self._gate_and_up(site, room, dtype)
        value = self._columns(site.tensors["down"], room, dtype)
        biases = {
            role: self._vector(site.tensors[role], dtype)
            for role in ("gate_bias", "up_bias", "down_bias")
            if role in site.tensors
        }
        query_bias, key_bias = _split(biases.get("gate_bias"), biases.get("up_bias"), site.fused)
        norms = self.norm_tensors(site, rules)
        if rules.norm is not None and self._options.fold_norm:
            gate, query_bias = self._fold(gate, query_bias, rules.norm, norms)
            up, key_bias = self._fold(up, key_bias, rules.norm, norms)
        if "post_norm" in norms:
            value *= self._gain(norms["post_norm"], rules.post_norm, dtype)
        return GatedLayer(
            gate,
            up,
            value,
            rules.activation,
            layer=site.layer,
            expert=site.expert,
            tower=site.tower,
            query_bias=query_bias,
            key_bias=key_bias,
            output_bias=biases.get("down_bias"),
            scale_note=rules.scale_note or _extras_note(site),
            sources={**site.tensors, **norms},
            norm=rules.norm_words(folded=self._options.fold_norm),
        )

    def _vector(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._source.read(name).to(dtype)

    def _rows(self, name: str, first: int, out: Tensor) -> Tensor:
        return gather(partial(self._source.read, name), first, out)

    def _columns(self, name: str, room: Room, dtype: torch.dtype) -> Tensor:
        """The transpose of a matrix: its columns as rows."""
        rows, width = self._source.infos()[name].shape
        return gather_transposed(partial(self._source.read, name), room("down", (width, rows), dtype))

    def _gate_and_up(self, site: Site, room: Room, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        names, shape = (site.tensors["gate"], site.tensors["up"]), (site.d_mlp, site.d_model)
        if site.fused == "interleaved":
            both = self._rows(names[0], 0, room("both", (2 * site.d_mlp, site.d_model), dtype))
            return both[0::2].contiguous(), both[1::2].contiguous()
        first = {None: (0, 0), "gate-first": (0, site.d_mlp), "up-first": (site.d_mlp, 0)}[site.fused]
        gate, up = (
            self._rows(name, start, room(role, shape, dtype))
            for role, name, start in zip(("gate", "up"), names, first, strict=True)
        )
        return gate, up

    def _norm_name(self, site: Site, norm: Norm, kind: str) -> str:
        name = self._beside(site, norm, kind)
        if name is None:
            raise IncompleteTriple(
                f"the norm {self._module(norm)}.{kind}, whose gain belongs to query and key, is missing",
                where=site.where,
                hint="The checkpoint is incomplete, or another family's rules apply (--family); "
                "--no-fold-norm measures without it",
            )
        shape = self._source.infos()[name].shape
        if shape != (site.d_model,):
            raise ShapeMismatch(f"{name!r} is {list(shape)}, expected [{site.d_model}]", where=site.where)
        return name

    def _module(self, norm: Norm) -> str:
        return (norm.gguf or GGUF_NORMS[norm.tensor]) if self._gguf else norm.tensor

    def _beside(self, site: Site, norm: Norm, kind: str) -> str | None:
        return self._inventory.beside(site, self._module(norm), kind)

    def _gain(self, name: str, norm: Norm, dtype: torch.dtype) -> Tensor:
        weight = self._vector(name, dtype)
        return 1 + weight if norm.weight == "offset" else weight

    def _fold(
        self, matrix: Tensor, bias: Tensor | None, norm: Norm, names: Mapping[str, str]
    ) -> tuple[Tensor, Tensor | None]:
        """Rows and constants that act on the normalised stream as the stored ones act on the norm's output."""
        if "norm_bias" in names:
            constant = matrix @ self._vector(names["norm_bias"], matrix.dtype)
            bias = constant if bias is None else bias + constant
        if "norm" in names:
            matrix *= self._gain(names["norm"], norm, matrix.dtype)
        if norm.kind == "layer":  # x has mean 0: what a row has along the ones direction never acts
            before = matrix.norm(dim=1, keepdim=True)
            matrix -= matrix.mean(dim=1, keepdim=True)
            # what rounding leaves of a row along that direction is no row
            matrix *= matrix.norm(dim=1, keepdim=True) > 1e-6 * before
        return matrix, bias


def _extras_note(site: Site) -> str | None:
    """Why the neuron's function is not known although the family is: something else stands in the MLP."""
    if not site.extras:
        return None
    return f"the MLP holds {', '.join(site.extras)} besides, which the family's rules do not know"


def _split(gate: Tensor | None, up: Tensor | None, fused: FusedOrder | None) -> tuple[Tensor | None, Tensor | None]:
    if fused is None or gate is None:
        return gate, up
    if fused == "interleaved":
        return gate[0::2].contiguous(), gate[1::2].contiguous()
    first, second = gate.chunk(2)
    return (first, second) if fused == "gate-first" else (second, first)
