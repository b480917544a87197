"""Do the factors of a checkpoint compute what the model computes? Asked of transformers' own modules.

For a few layers the MLP of the checkpoint is run twice on the same random input: as the module that transformers
builds from the config, with the file's weights, and as the factors that are measured. Then again behind its norm, on a
residual stream. And the model is run without numbers, to see which norm its MLPs read.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checkpoint.checkpoint import Checkpoint, open_checkpoint
from .checkpoint.places import locate, located, pattern
from .errors import BadOption
from .layer_rows import expert_group
from .neurons import GatedLayer
from .reference_model import NotComparable, ReferenceModel, ReferenceModels, function_of
from .selection import select_layers
from .verdicts import compare_alone, compare_behind_norm, compare_with_norm_inside, is_rightly_fed

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = (
    "tower", "layer", "expert", "tensor", "module", "relative_error", "exchanged_error", "folded_error", "fed_by",
    "verdict", "reason",
)  # fmt: skip
_NAN = float("nan")


@dataclass(frozen=True, eq=False, repr=False)
class Check:
    """What came out, a row for every MLP that was looked at.

    Attributes:
        frame: with columns

            * tower, layer, expert, tensor: which MLP; tensor is the one that holds its gate;
            * module: class of the module that transformers runs;
            * relative_error: of the factors' output, against the module's;
            * exchanged_error: the same with gate and up exchanged, which must be large;
            * folded_error: of the factors with the norm folded in, against the norm's module and then the MLP's;
            * fed_by: the module whose output the MLP reads, "" where it is no module's output, missing where it could
              not be seen;
            * verdict: "reproduced", "mismatch" or "not compared", and reason, "" if there is nothing to say.
        checkpoint: the checkpoint, as it is read by the report.
        reference: what it was compared with; None if nothing could be.
    """

    frame: pd.DataFrame
    checkpoint: Checkpoint
    reference: str | None

    def __repr__(self) -> str:
        counts = self.frame["verdict"].value_counts()
        return f"Check({self.checkpoint.name}: " + ", ".join(f"{counts[v]} {v}" for v in counts.index) + ")"

    def __str__(self) -> str:
        from .overview import check_text

        return check_text(self)

    @property
    def ok(self) -> bool:
        """No MLP contradicts its module. Those that could not be compared do not."""
        return not self.frame["verdict"].eq("mismatch").any()


def check(
    model: str | os.PathLike | Checkpoint,
    *,
    layers: Iterable[int] | str | None = None,
    seed: int = 0,
    max_gb: float = 16.0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    **options: Any,
) -> Check:
    """Compare factors with the modules of transformers, for a few layers.

    Code that comes with a repository is never run: where transformers itself does not know the model, nothing is
    compared, and the reason is given.

    Args:
        model: a reference as `open_checkpoint` takes it, or an opened checkpoint.
        layers: which layers, as in `probe`. By default the first, middle and last of every kind of MLP in every stack;
            of a layer's routed experts always the first, middle and last.
        seed: of the random input.
        max_gb: do not compare MLPs that would need more memory, in units of 10^9 bytes.
        progress: wraps the iteration over MLPs, for a progress bar.
        **options: family, fused_layout, expert_layout and activation, as `open_checkpoint` takes them, if `model` is a
            reference.

    Raises:
        GluProbeError: the checkpoint cannot be opened, or an option means nothing.
    """
    if isinstance(model, Checkpoint) and options:
        raise BadOption(
            f"{', '.join(sorted(options))} given for a checkpoint that is already open",
            hint="Give them to open_checkpoint",
        )
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model, **options)
    folded = checkpoint.with_options(fold_norm=True, fold_post_norm=False)
    chosen = list(_chosen(folded, layers))
    reference = _Reference(folded, chosen, seed=seed, max_gb=max_gb)
    rows = [reference.row(mlp) for mlp in progress(chosen)]
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(_COLUMNS)).astype({"expert": "string", "fed_by": "string"})
    return Check(frame, folded, reference.words)


@dataclass(frozen=True)
class _MLP:
    """One MLP to compare.

    Attributes:
        tensors: names of its gate, up and down, and `norm`, that of the gain folded in.
        size: number of its weights.
        experts: how many routed experts the layer has; 0 for an MLP that is none of them.
        stacked: the tensors hold those of all of them.
    """

    tower: str
    layer: int
    expert: int | str | None
    tensors: tuple[str, str, str]
    norm: str | None
    size: int
    experts: int
    stacked: bool


def _chosen(checkpoint: Checkpoint, layers: Iterable[int] | str | None) -> Iterator[_MLP]:
    frame = checkpoint.describe()
    kinds = frame["expert"].map(lambda name: expert_group(_expert(name)), na_action=None)
    wanted = None if layers is None else select_layers(layers, sorted({*frame["layer"]}))
    for (_, kind), part in frame.groupby([frame["tower"], kinds], sort=False):
        present = sorted({*part["layer"]})
        for layer in _ends_and_middle(present) if wanted is None else [one for one in present if one in wanted]:
            here = part[part["layer"] == layer]
            for row in _ends_and_middle([*here.itertuples()]) if kind == "routed" else here.itertuples():
                yield _MLP(
                    row.tower, int(layer), _expert(row.expert), (row.gate, row.up, row.down),
                    row.norm_tensor if isinstance(row.norm_tensor, str) else None,
                    3 * int(row.d_model) * int(row.d_mlp), len(here) if kind == "routed" else 0,
                    kind == "routed" and int((here["gate"] == row.gate).sum()) > 1,
                )  # fmt: skip


def _expert(name: Any) -> int | str | None:
    """The expert as `Checkpoint.layer` takes it, from its name in a frame."""
    if not isinstance(name, str):
        return None
    return int(name) if name.isdigit() else name


def _ends_and_middle(items: list) -> list:
    return [items[i] for i in sorted({0, (len(items) - 1) // 2, len(items) - 1})]


class _Reference:
    """What transformers makes of a checkpoint, and the rows that come of it."""

    def __init__(self, checkpoint: Checkpoint, mlps: list[_MLP], *, seed: int, max_gb: float) -> None:
        self._folded, self._raw = checkpoint, checkpoint.with_options(fold_norm=False)
        self._mlps, self._seed, self._limit = mlps, seed, max_gb * 1e9
        self._models = ReferenceModels(checkpoint.config)
        self._gguf = checkpoint.provenance()["format"] == "gguf"
        self._feeds: dict[str, dict[str, str | None]] = {}

    @property
    def words(self) -> str | None:
        """What was compared with."""
        return (
            f"transformers {importlib.metadata.version('transformers')}, {', '.join(self._feeds)}"
            if self._feeds
            else None
        )

    def row(self, mlp: _MLP) -> dict[str, Any]:
        """Compare one MLP."""
        row: dict[str, Any] = {
            "tower": mlp.tower, "layer": mlp.layer, "expert": None if mlp.expert is None else str(mlp.expert),
            "tensor": mlp.tensors[0], "module": None, "relative_error": _NAN, "exchanged_error": _NAN,
            "folded_error": _NAN, "fed_by": None, "verdict": "not compared", "reason": "",
        }  # fmt: skip
        try:
            self._compare(mlp, row)
        except NotComparable as reason:
            row |= {"verdict": "not compared", "reason": str(reason)}
        return row

    def _compare(self, mlp: _MLP, row: dict[str, Any]) -> None:
        if self._gguf:
            raise NotComparable(
                "a GGUF file does not hold the configuration that transformers builds a model from; `glu-probe activations` "
                "compares the factors with the running model, where transformers can load the file"
            )
        need = 12 * mlp.size  # the module and the factors in float32, and working copies
        if need > self._limit:
            raise NotComparable(
                f"it would take {need / 1e9:.2g} GB of memory, above the limit of {self._limit / 1e9:g}"
            )
        model, path = self._find(mlp)
        module = model.filled(path, self._own(mlp), self._reader(mlp), experts=mlp.experts)
        function = function_of(module, routed=bool(mlp.experts))
        row |= {"module": type(module).__name__, "fed_by": self._fed_by(model, path)}
        precise: dict[str, Any] = {"seed": self._seed, "double": 2 * need <= self._limit}
        norm = self._norm(mlp, model, row["fed_by"])
        rules = self._folded.rules(mlp.layer, mlp.expert, mlp.tower)
        if norm is not None and norm.startswith(f"{path}."):
            compare_with_norm_inside(row, self._layer(self._folded, mlp), rules, module, function, **precise)
            return
        known = compare_alone(row, self._layer(self._raw, mlp), rules, module, function, **precise)
        if row["verdict"] == "reproduced" and is_rightly_fed(row, rules, norm) and norm:
            norm_module = model.filled(norm, self._beside(mlp), self._read)
            layer = self._layer(self._folded, mlp)
            compare_behind_norm(row, layer, rules, known, norm, norm_module, module, function, **precise)

    # -- what belongs to the MLP -----------------------------------------------------------------

    def _find(self, mlp: _MLP) -> tuple[ReferenceModel, str]:
        model, path = self._models.find(mlp.tensors)
        head, experts, rest = path.partition(".experts.")
        # below the experts' module only single experts can be called
        return model, f"{head}.experts" if experts and mlp.experts and not rest[0].isdigit() else path

    def _layer(self, checkpoint: Checkpoint, mlp: _MLP) -> GatedLayer:
        return checkpoint.layer(mlp.layer, mlp.expert, mlp.tower)

    def _read(self, name: str) -> Tensor:
        return _widened(self._folded.source.read(name))

    def _beside(self, mlp: _MLP) -> list[str]:
        """All tensors of the MLP's layer."""
        place = located(mlp.tensors[0])
        return self._layers[place.prefix, place.layer]

    @cached_property
    def _layers(self) -> dict[tuple[str, int], list[str]]:
        """Names of tensors by stack and layer."""
        layers: dict[tuple[str, int], list[str]] = {}
        for name in self._folded.source.infos():
            if (place := locate(name)) is not None:
                layers.setdefault((place.prefix, place.layer), []).append(name)
        return layers

    def _own(self, mlp: _MLP) -> list[str]:
        """Tensors of the MLP's layer, without those of other experts."""
        own = {located(name).block for name in mlp.tensors}
        alike = {pattern(block) for block in own}
        blocks = ((name, located(name).block) for name in self._beside(mlp))
        return [name for name, block in blocks if block in own or not mlp.experts or pattern(block) not in alike]

    def _reader(self, mlp: _MLP) -> Callable[[str], Tensor]:
        """Reads a tensor, or the expert's part of one that holds all experts."""
        expert, experts = mlp.expert, mlp.experts
        if not mlp.stacked or not isinstance(expert, int):
            return self._read
        source, blocks = self._folded.source, {located(name).block for name in mlp.tensors}

        def read(name: str) -> Tensor:
            shape = source.infos()[name].shape
            if located(name).block not in blocks or not shape or shape[0] % experts:
                return self._read(name)
            count = shape[0] // experts
            return _widened(source.read(name, slice(expert * count, (expert + 1) * count)))

        return read

    def _fed_by(self, model: ReferenceModel, path: str) -> str | None:
        """What the MLP reads in the running model: a module's path, "" if it is no module's output, None if not seen."""
        if model.name not in self._feeds:  # one run for all of them
            paths = set()
            for mlp in self._mlps:
                with contextlib.suppress(NotComparable):
                    other, its_path = self._find(mlp)
                    paths |= {its_path} if other is model else set()
            self._feeds[model.name] = model.feeds(paths)
        feeds = self._feeds[model.name]
        return (feeds[path] or "") if path in feeds else None

    def _norm(self, mlp: _MLP, model: ReferenceModel, fed_by: str | None) -> str | None:
        """The module whose norm is folded in, None if there is none.

        A norm without weights has no tensor: it is the module that feeds the MLP, if one does.
        """
        return fed_by or None if mlp.norm is None else (model.key(mlp.norm) or "").rpartition(".")[0]


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
