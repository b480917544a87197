"""Everything that was found in a file's names: the MLPs, and what stands beside them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from .places import Parameter
from .sites import Site
from .source import TensorInfo

# A norm of the MLP's by its name; one in the middle of it ("sub") is another matter.
_MLP_NORM = re.compile(r"^(?!.*sub).*(feed_?forward|ffn|ffw|mlp|\bff)_?(.*_)?(layer_?)?norm")
_OUTPUT_SCALE = re.compile(r"(layer_?scale_?2|mlp_layer_?scale|ls_?2|gamma_?2|lambda_?2)(\.|$)")


@dataclass
class Inventory:
    """What `find_sites` found.

    Attributes:
        sites: the MLPs in order.
        layers: all layers of each tower that has any MLP, those without one too.
        index: every tensor with a layer index, by place.
        notes: what was left out, and why.
        prefixes: what the names of each tower's tensors begin with.
    """

    sites: list[Site]
    layers: dict[str, list[int]]
    index: dict[Parameter, str]
    notes: list[str]
    prefixes: dict[str, str]
    _mlp_norms: dict[tuple[str, int], set[str]] | None = None

    def beside(self, site: Site, module: str, kind: str) -> str | None:
        """The tensor of that module in the site's layer, whatever wrappers stand in its name; None if absent."""
        *block, leaf = module.split(".")
        return self.index.get(Parameter(site.prefix, site.layer, tuple(block), leaf, kind))

    def mlp_norms(self, prefix: str, layer: int) -> set[str]:
        """Norms that stand directly in a layer and are called the MLP's."""
        if self._mlp_norms is None:
            self._mlp_norms = defaultdict(set)
            for place in self.index:
                if not place.block and _MLP_NORM.search(place.leaf):
                    self._mlp_norms[place.prefix, place.layer].add(place.leaf)
        return self._mlp_norms[prefix, layer]

    def output_scales(self) -> dict[str, list[str]]:
        """By tower, vectors beside its MLPs that multiply what they write, under the names of their modules."""
        towers = {prefix: tower for tower, prefix in self.prefixes.items()}
        found: dict[str, set[str]] = defaultdict(set)
        for place in self.index:
            path = ".".join((*place.block, place.leaf))
            if place.prefix in towers and _OUTPUT_SCALE.match(path):
                found[towers[place.prefix]].add(path)
        return {tower: sorted(paths) for tower, paths in found.items()}

    def norm_widths(self, infos: Mapping[str, TensorInfo]) -> dict[tuple[str, int], set[int]]:
        """Sizes of the norms that stand directly in each layer of each stack."""
        return norm_widths(self.index, infos)


def norm_widths(index: Mapping[Parameter, str], infos: Mapping[str, TensorInfo]) -> dict[tuple[str, int], set[int]]:
    """Sizes of the norms that stand directly in each layer of each stack."""
    widths: dict[tuple[str, int], set[int]] = {}
    for place, name in index.items():
        if not place.block and "norm" in place.leaf and len(infos[name].shape) == 1:
            widths.setdefault((place.prefix, place.layer), set()).add(infos[name].shape[0])
    return widths
