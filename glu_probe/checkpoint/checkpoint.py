"""A checkpoint opened for reading factors: what it holds, from headers alone, and its layers one at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..activations import Activation
from ..errors import BadOption
from ..neurons import GatedLayer
from .ends import Ends, find_ends
from .factors import FactorReader
from .family import EXPERT_LAYOUTS, FUSED_ORDERS, FusedOrder
from .files import OpenedFiles, open_files
from .layout import Reading, find_sites
from .memory import Room, fresh
from .notes import assumptions, disagreements, refuse_other_widths, without_effect
from .quantized.parts import scheme_of
from .ref import parse_ref, public
from .rules import Config, MLPRules, Options, TowerRules, decide, gguf_config
from .sites import Site
from .source import TensorSource
from .stored import StoredLayer

if TYPE_CHECKING:
    import pandas as pd


def open_checkpoint(
    ref: str | os.PathLike,
    *,
    fold_norm: bool = True,
    fold_post_norm: bool = False,
    family: str | None = None,
    fused_layout: FusedOrder | None = None,
    activation: str | None = None,
    expert_layout: Literal["rows", "columns"] | None = None,
    download: bool = False,
) -> Checkpoint:
    """Open a model for its gated MLPs. Headers are read, weights are not.

    Args:
        ref: a directory with config.json and safetensors (or .bin) files, a .safetensors, .gguf or .bin file, a hub
            repository as "org/name" or "org/name@revision", "hf://org/name[@revision][/file]", or a URL of a weight
            file or of a directory of them. An existing path wins.
        fold_norm: fold the gain of the norm before the MLP into query and key (and centre them for LayerNorm).
        fold_post_norm: fold the gain of a norm on the MLP's output into value.
        family: name of the family whose rules apply, instead of the config's model_type.
        fused_layout: "gate-first", "up-first" or "interleaved", for fused tensors of families not in the table.
        activation: name of the activation, instead of the config's. These three are about the language model (and its
            encoder); towers for pictures or sound are read as the config says.
        expert_layout: "rows" if the stacked experts of a layer are [out, in], as linear layers are, "columns" if they
            are [in, out]; for tensors whose shape fits both.
        download: fetch remote files whole, once tensors of them are read, into the cache of huggingface_hub (those of
            plain URLs into that of glu-probe). Otherwise only the bytes that are needed are fetched, and nothing is kept.

    Raises:
        GluProbeError: one of its subclasses, saying what, where and what to do.
    """
    if fused_layout is not None and fused_layout not in FUSED_ORDERS:
        raise BadOption(f"fused_layout is {fused_layout!r}", hint=f"Use one of {', '.join(FUSED_ORDERS)}")
    if expert_layout is not None and expert_layout not in EXPERT_LAYOUTS:
        raise BadOption(f"expert_layout is {expert_layout!r}", hint=f"Use one of {', '.join(EXPERT_LAYOUTS)}")
    parsed = parse_ref(ref)
    options = Options(fold_norm, fold_post_norm, family, fused_layout, activation, expert_layout)
    return Checkpoint(str(ref), parsed.name, open_files(parsed, download=download), options)


class Checkpoint:
    """The gated MLPs of one model.

    Attributes:
        ref, name: what the user typed, and the short name used in frames.
        options: how it is read.
        sites: every gated MLP found, in order.
        notes: what a reader of the results should know, one sentence each.
    """

    def __init__(self, ref: str, name: str, opened: OpenedFiles, options: Options) -> None:
        self.ref, self.name, self.options = ref, name, options
        self._source, self._opened = opened.source, opened
        gguf = opened.format == "gguf"
        infos = self._source.infos()
        self._config = Config(gguf_config(opened.config, infos) if gguf else opened.config, gguf)
        self._inventory = find_sites(
            infos,
            Reading(
                lambda tower, prefix: self._config.family(tower, options.family, prefix)[1],
                self._config.of,
                gguf=gguf,
                model_type=self.model_type,
                fused_layout=options.fused_layout,
                expert_layout=options.expert_layout,
                scheme=scheme_of(opened.config).method,
            ),
        )
        self.sites: list[Site] = self._inventory.sites
        self._reader = FactorReader(self._source, self._inventory, options, gguf=gguf)
        self._rules = {
            tower: decide(self._config, tower, options, self._inventory.prefixes[tower])
            for tower in dict.fromkeys(site.tower for site in self.sites)
        }
        refuse_other_widths(self._inventory, self._config, infos)
        self.notes: list[str] = [
            *opened.notes,
            *disagreements(self._inventory, self._config),
            *self._inventory.notes,
            *assumptions(self._inventory, self._config, self._rules),
            *without_effect(self.sites, options),
        ]

    def __repr__(self) -> str:
        return f"Checkpoint({self.name}: {len(self.sites)} gated MLPs, model_type {self.model_type})"

    @property
    def model_type(self) -> str | None:
        """`model_type` of the config, or `general.architecture` of a GGUF file."""
        return self._config.model_type

    @property
    def in_files(self) -> bool:
        """Whether `ref` leads to files, rather than the tensors being those of a model in memory."""
        return self._opened.format != "in memory"

    @property
    def download(self) -> bool:
        """Whether it was opened with `download`: remote files are fetched whole, once tensors of them are read."""
        return self._opened.download

    @property
    def source(self) -> TensorSource:
        """The tensors of the files, by name."""
        return self._source

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json as it stands there, or the metadata of a GGUF file under the same names."""
        return self._config.values

    def with_options(self, **changes: Any) -> Checkpoint:
        """The same files, read with some of `Options` changed."""
        return Checkpoint(self.ref, self.name, self._opened, replace(self.options, **changes))

    @property
    def parameter_count(self) -> int:
        """Number of values in all tensors of the files."""
        return sum(math.prod(info.shape) for info in self._source.infos().values())

    @property
    def layers_present(self) -> dict[str, list[int]]:
        """All layers of each tower, those without a gated MLP too."""
        return self._inventory.layers

    def provenance(self) -> dict[str, Any]:
        """What identifies the weights and how they were read; JSON-ready."""
        return {
            "model": self.name,
            "ref": public(self.ref),
            "format": self._opened.format,
            **self._opened.provenance,
            "model_type": self.model_type,
            "towers": {tower: self._tower_provenance(tower, rules) for tower, rules in self._rules.items()},
            "options": {name: getattr(self.options, name) for name in Options.__dataclass_fields__},
            "notes": self.notes,
        }

    def _tower_provenance(self, tower: str, rules: TowerRules) -> dict[str, Any]:
        sites = [site for site in self.sites if site.tower == tower]
        infos = self._source.infos()
        gates = (self._reader.rules(site, rules).activation for site in sites)
        return {
            "family": rules.name,
            "activation": " / ".join(dict.fromkeys(gate.name for gate in gates if gate)) or None,
            "activation_source": rules.activation_source,
            "norm": rules.norm_words(folded=self.options.fold_norm),
            "post_norm": f"{rules.post_norm.words}, {'folded into value' if self.options.fold_post_norm else 'not folded'}"
            if rules.post_norm else None,
            "layout": sorted({site.layout for site in sites}),
            "dtypes": sorted({infos[name].dtype for site in sites for name in site.tensors.values()}),
            "gated_mlps": len(sites),
            "last_layer": max(self.layers_present[tower]),
        }  # fmt: skip

    def describe(self) -> pd.DataFrame:
        """One row per gated MLP, from headers alone.

        Columns: model, tower, layer, expert, d_model, d_mlp, layout, activation, norm, dtype, bytes (that reading its
        factors takes), and the tensor names gate, up, down and norm_tensor (whose gain is folded in; missing if none is).
        """
        import pandas as pd

        infos, rows = self._source.infos(), []
        for site in self.sites:
            tower = self._rules[site.tower]
            rules = self._reader.rules(site, tower)
            norms = self.norms_of(site)
            rows.append(
                {
                    "model": self.name,
                    "tower": site.tower,
                    "layer": site.layer,
                    "expert": None if site.expert is None else str(site.expert),
                    "d_model": site.d_model,
                    "d_mlp": site.d_mlp,
                    "layout": site.layout,
                    "activation": rules.activation.name if rules.activation else None,
                    "norm": rules.norm_words(folded=self.options.fold_norm),
                    "dtype": infos[site.tensors["gate"]].dtype,
                    "bytes": self._reader.nbytes(site, norms),
                    "gate": site.tensors["gate"],
                    "up": site.tensors["up"],
                    "down": site.tensors["down"],
                    "norm_tensor": norms.get("norm"),
                }
            )
        frame = pd.DataFrame(rows)
        return frame.astype({"expert": "string", "norm_tensor": "string"})

    # -- factors ---------------------------------------------------------------------------------

    def layers(self) -> Iterator[GatedLayer]:
        """Every gated MLP in the file, one at a time, in order of tower, layer and expert."""
        for site in self.sites:
            yield self.load(site)

    def layer(self, layer: int, expert: int | str | None = None, tower: str = "text") -> GatedLayer:
        """The factors of one layer's MLP.

        Args:
            layer: its index in the model.
            expert: routed index or "shared" in a mixture of experts; None for a dense MLP, or the name of its block
                where the layer has several.
            tower: which stack of layers.

        Raises:
            BadOption: there is no such MLP; the message says what there is.
        """
        return self.load(self.site(layer, expert, tower))

    def rules(self, layer: int, expert: int | str | None = None, tower: str = "text") -> MLPRules:
        """What was decided for the MLP that `layer` would read."""
        site = self.site(layer, expert, tower)
        return self._reader.rules(site, self._rules[site.tower])

    def site(self, layer: int, expert: int | str | None = None, tower: str = "text") -> Site:
        """The MLP that `layer` would read; see there."""
        towers = {site.tower for site in self.sites}
        tower = next(iter(towers)) if tower == "text" and len(towers) == 1 else tower
        here = [site for site in self.sites if site.tower == tower and site.layer == layer]
        for site in here:
            if site.expert == expert:
                return site
        if here:
            experts = ", ".join(repr(site.expert) for site in here[:8])
            alone = [site.expert for site in here] == [None]
            raise BadOption(
                f"layer {layer} has no expert {expert!r}",
                where=self.name,
                hint="It has one dense MLP: name no expert" if alone else f"It has experts {experts}",
            )
        known = sorted({site.layer for site in self.sites if site.tower == tower})
        raise BadOption(
            f"there is no gated MLP in layer {layer} of {tower!r}",
            where=self.name,
            hint=f"There are gated MLPs in layers {spans(known)}"
            if known
            else f"There are the stacks {', '.join(sorted(towers))}",
        )

    def ends(self, site: Site) -> Ends:
        """Where the vocabulary enters and leaves the residual stream that this MLP stands in."""
        rules, tower = self.rules_of(site), self._rules[site.tower]
        return find_ends(
            self._source.infos(),
            site.prefix,
            site.d_model,
            tower=site.tower,
            norm=rules.norm or rules.post_norm,
            family=tower.name,
            config=self._config.values,
            parts=tower.part,
            gguf=self._config.gguf,
        )

    def output_gain(self, site: Site) -> Tensor | None:
        """[d_model] gain of the norm on this MLP's output, whether or not it is folded into value; None without such a norm.

        Raises:
            IncompleteTriple, ShapeMismatch: it is absent, or has another width.
        """
        return self._reader.output_gain(site, self._rules[site.tower])

    def token_pieces(self) -> list[str] | None:
        """The vocabulary in a GGUF file, as its tokenizer spells it, by id; None where there is none."""
        return self._opened.strings("tokenizer.ggml.tokens")

    def rules_of(self, site: Site) -> MLPRules:
        """What was decided for one MLP: its gate, the norms around it, constants."""
        return self._reader.rules(site, self._rules[site.tower])

    def norms_of(self, site: Site) -> dict[str, str]:
        """Names of the norm tensors that are folded in: roles "norm", "norm_bias", "post_norm"."""
        tower = self._rules[site.tower]
        return self._reader.norm_tensors(site, self._reader.rules(site, tower), tower)

    def activation_of(self, site: Site) -> Activation | None:
        """The gate of one MLP; None where it is not known."""
        return self.rules_of(site).activation

    def load(self, site: Site, room: Room = fresh) -> GatedLayer:
        """Read one MLP and make its factors."""
        return self._reader.load(site, self._rules[site.tower], room)

    def stored(self, site: Site, room: Room = fresh, limit: int | None = None) -> StoredLayer:
        """One MLP as it is stored, for who looks at its rows a few at a time.

        Args:
            room: memory for what is held.
            limit: bytes that may be held; what is larger stays in its file. None for no limit.
        """
        return self._reader.stored(site, self._rules[site.tower], room, limit)


def spans(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
