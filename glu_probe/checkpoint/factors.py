"""From one MLP's slabs to its factors: orientation, dtype, the family's constants, and the fold of the norm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ..errors import IncompleteTriple, LayoutUnknown, ShapeMismatch
from ..layer_rows import Fold, HeldRows, Read
from ..neurons import GatedLayer
from .families import gguf_norm
from .family import Family, Norm
from .inventory import Inventory
from .memory import Part, Room, fresh, gather, gather_direct, gather_interleaved, gather_transposed
from .raw import FileColumns, FileRows, RawMatrix, in_place_or_spooled, stripe_bytes
from .rules import MLPRules, Options, TowerRules
from .sites import Site
from .slabs import Slab
from .source import IN_MEMORY, TensorSource
from .stored import StoredFactor, StoredLayer, StoredRows

_WEIGHTS = ("gate", "up", "down")


class FactorReader:
    """Reads one site at a time and makes a `GatedLayer` of it."""

    def __init__(self, source: TensorSource, inventory: Inventory, options: Options, *, gguf: bool) -> None:
        self._source, self._inventory, self._options, self._gguf = source, inventory, options, gguf

    def rules(self, site: Site, tower: TowerRules) -> MLPRules:
        """The rules of one MLP of a tower."""
        return tower.at(site.layer, site.block, site.expert, (*site.extras, *self._unforeseen(site, tower.family)))

    def norm_tensors(self, site: Site, rules: MLPRules, tower: TowerRules) -> dict[str, str]:
        """Names of the norm tensors that the options fold in: roles "norm", "norm_bias", "post_norm".

        Raises:
            IncompleteTriple, ShapeMismatch, LayoutUnknown: one is absent, has another width, or is not foreseen.
        """
        wanted = {}
        if rules.norm is not None and self._options.fold_norm:
            has = {"weight": rules.norm.weight != "none", "bias": bool(rules.norm.bias)}
            roles = {"weight": "norm", "bias": "norm_bias"}
            for kind, role in roles.items():
                if has[kind]:
                    wanted[role] = self._norm_name(site, rules.norm, kind)
                elif (name := self._beside(site, rules.norm, kind)) is not None:
                    raise self._contradicted(site, f"{name!r} is a {kind}", tower.name)
        if self._options.fold_norm and (others := self._unforeseen(site, tower.family)):
            raise self._contradicted(site, f"the layer has {', '.join(others)}, norms beside the MLP", tower.name)
        if rules.post_norm is not None and self._options.fold_post_norm:
            wanted["post_norm"] = self._norm_name(site, rules.post_norm, "weight")
        return wanted

    def _contradicted(self, site: Site, found: str, family: str | None) -> LayoutUnknown:
        return LayoutUnknown(
            f"{found} that the rules of family {family!r} do not know",
            where=site.where,
            hint="Another family's rules may apply (--family); --no-fold-norm measures without the norm",
        )

    def _unforeseen(self, site: Site, family: Family | None) -> list[str]:
        """Norms in the layer that are the MLP's by their names, and that the family does not have."""
        if family is None:
            return []
        known = {name for norm in family.norms for name in self._module(norm).split("|")}
        return sorted(self._inventory.mlp_norms(site.prefix, site.layer) - known)

    def output_gain(self, site: Site, tower: TowerRules) -> Tensor | None:
        """Gain of the norm on the MLP's output, whatever the options fold in; None without such a norm."""
        norm = self.rules(site, tower).post_norm
        if norm is None or norm.weight == "none":
            return None
        return self._gain(self._norm_name(site, norm, "weight"), norm, torch.float64)

    def nbytes(self, site: Site, norms: Mapping[str, str]) -> int:
        """Stored bytes that loading it reads."""
        infos = self._source.infos()
        parts = {
            (s.name, s.expert, s.first if s.step == 1 else 0): s.nbytes(infos[s.name]) for s in site.slabs.values()
        }
        whole = {}  # matrices of which both halves are read at once, or wholly
        for (name, expert, first), size in parts.items():
            half = expert is None and 2 * size == infos[name].nbytes
            whole[name, expert, first if half else 0] = size
        return sum(whole.values()) + sum(infos[name].nbytes for name in norms.values())

    def load(self, site: Site, tower: TowerRules, room: Room = fresh) -> GatedLayer:
        """Read one MLP into the given room. All of it in float32, or in float64 where a matrix of it is that."""
        return self.stored(site, tower, room).widened(room)

    def stored(self, site: Site, tower: TowerRules, room: Room = fresh, limit: int | None = None) -> StoredLayer:
        """What the factors of one MLP are made of.

        Args:
            room: for what is held in memory.
            limit: bytes that may be held; a larger MLP stays in its file, whose parts are read when they are asked for.
                Experts are always held, and so is what is in memory already. None for no limit.
        """
        infos = self._source.infos()
        dtypes = {infos[site.tensors[role]].dtype for role in _WEIGHTS}
        dtype = torch.float64 if "F64" in dtypes else torch.float32
        rules, shape = self.rules(site, tower), (site.d_mlp, site.d_model)
        norms = self.norm_tensors(site, rules, tower)
        norm, post_norm = rules.norm if self._options.fold_norm else None, rules.post_norm
        gain = self._gain(norms["norm"], norm, dtype) if norm is not None and "norm" in norms else None
        post = self._gain(norms["post_norm"], post_norm, dtype) if post_norm and "post_norm" in norms else None
        inner = Fold(gain, norm is not None and norm.kind == "layer")
        in_memory = infos[site.tensors["gate"]].file == IN_MEMORY
        held = in_memory or site.slabs["gate"].expert is not None or limit is None or site.held_bytes(infos) <= limit
        rows: Mapping[str, StoredRows] = (
            self._held(site, room) if held or limit is None else self._in_files(site, limit)
        )
        query, key, value = (
            StoredFactor(rows[role], shape, dtype, constant, fold)
            for role, constant, fold in zip(_WEIGHTS, rules.multipliers, (inner, inner, Fold(post)), strict=True)
        )
        query_bias, key_bias, output_bias = (
            self._bias(site, role, constant, dtype) for role, constant in zip(_WEIGHTS, rules.multipliers, strict=True)
        )
        if "norm_bias" in norms:
            constant = self._source.read(norms["norm_bias"]).to(dtype)
            query_bias, key_bias = (
                factor.times(constant) if bias is None else bias + factor.times(constant)
                for factor, bias in ((query, query_bias), (key, key_bias))
            )
        return StoredLayer(
            {"query": query, "key": key, "value": value},
            rules.activation,
            layer=site.layer,
            expert=site.expert,
            tower=site.tower,
            query_bias=query_bias,
            key_bias=key_bias,
            output_bias=output_bias,
            scale_note=rules.note,
            sources={**site.tensors, **norms},
            norm=rules.norm_words(folded=self._options.fold_norm),
            held=held,
        )

    def _held(self, site: Site, room: Room) -> dict[str, HeldRows]:
        """The three matrices in memory, neuron by neuron; rows that two of them are part of are read once."""
        by_tensor: dict[tuple[str, int | None], dict[str, Slab]] = {}
        for role in _WEIGHTS:
            slab = site.slabs[role]
            by_tensor.setdefault((slab.name, slab.expert), {})[role] = slab
        found: dict[str, Tensor] = {}
        for (name, expert), slabs in by_tensor.items():
            found |= zip(slabs, self._matrices(name, expert, slabs, room), strict=True)
        return {role: HeldRows(found[role]) for role in _WEIGHTS}

    def _matrices(self, name: str, expert: int | None, slabs: Mapping[str, Slab], room: Room) -> list[Tensor]:
        """What is taken of one tensor, or of one expert in it."""
        height, width = self._source.infos()[name].shape[-2:]
        read: Read = partial(self._source.read, name)
        if expert is not None:
            read = HeldRows(self._source.read(name, slice(expert, expert + 1))[0])
        parts = [Part(slab.picked, role) for role, slab in slabs.items()]
        first, raw = next(iter(slabs.values())), None if expert is not None else self._raw(name)
        if first.columns:
            # of a local file several chunks may be read at once, each of which takes memory
            return gather_transposed(read, height, parts, (first.count, height), room, lanes=2 if raw else 1)
        if len(parts) > 1 and first.step == len(parts):
            return gather_interleaved(read, parts, (first.count, width), room)
        if raw is not None and first.step == 1:
            return [gather_direct(raw.fill, raw.dtype, part, (first.count, width), room) for part in parts]
        return [gather(read, part, (first.count, width), room) for part in parts]

    def _raw(self, name: str) -> RawMatrix | None:
        """Where a matrix of floats lies in a local file; None if it does not."""
        find = getattr(self._source, "raw", None)
        return None if find is None else find(name)

    def _in_files(self, site: Site, limit: int) -> dict[str, FileRows | FileColumns]:
        """The three matrices where they are, or in temporary files; both halves of one share it."""
        stripe = stripe_bytes(limit, sum(site.slabs[role].columns for role in _WEIGHTS))
        matrices: dict[str, RawMatrix] = {}
        rows: dict[str, FileRows | FileColumns] = {}
        for role in _WEIGHTS:
            slab = site.slabs[role]
            if slab.name not in matrices:
                height, width = self._source.infos()[slab.name].shape
                raw = getattr(self._source, "raw", None)
                read = partial(self._source.read, slab.name)
                matrices[slab.name] = in_place_or_spooled(raw, read, slab.name, (height, width))
            where = matrices[slab.name], slab.count, slab.first, slab.step
            rows[role] = FileColumns(*where, stripe) if slab.columns else FileRows(*where)
        return rows

    def _bias(self, site: Site, role: str, constant: float, dtype: torch.dtype) -> Tensor | None:
        slab = site.slabs.get(f"{role}_bias")
        if slab is None:
            return None
        if slab.expert is None:
            values = self._source.read(slab.name)
        else:
            values = self._source.read(slab.name, slice(slab.expert, slab.expert + 1))[0]
        return values[slab.picked].to(dtype) * constant

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
            raise ShapeMismatch(
                f"{name!r} is {list(shape)}, expected [{site.d_model}]",
                where=site.where,
                hint="It belongs to another model or family: check the config and --family",
            )
        return name

    def _module(self, norm: Norm) -> str:
        return (gguf_norm(norm) or norm.tensor) if self._gguf else norm.tensor

    def _beside(self, site: Site, norm: Norm, kind: str) -> str | None:
        found = (self._inventory.beside(site, module, kind) for module in self._module(norm).split("|"))
        return next(filter(None, found), None)

    def _gain(self, name: str, norm: Norm, dtype: torch.dtype) -> Tensor:
        return read_gain(self._source, name, norm, dtype)


def read_gain(source: TensorSource, name: str, norm: Norm, dtype: torch.dtype) -> Tensor:
    """[d_model] gain of a norm that is stored under that name."""
    weight = source.read(name).to(dtype)
    return 1 + weight if norm.weight == "offset" else weight
