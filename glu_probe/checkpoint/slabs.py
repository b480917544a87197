"""Where in which tensor the rows of one factor lie: halves, experts and orientation, decided from shapes.

Two things vary independently: which names gate, up and down have and in which order a shared tensor holds them
(`Projections`), and how the experts of a layer are stored (one by one, stacked one way round or the other, or below
each other). Here both become `Slab`s: where to read, without reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from ..errors import LayoutAmbiguous, NoExpertsMapped, ShapeMismatch
from .family import Projections, Storage
from .source import TensorInfo

_ROLES = ("gate", "up", "down")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slab:
    """The part of a tensor that is one factor, neuron by neuron.

    Attributes:
        name: the tensor.
        count: number of neurons (of values, for a bias).
        first, step: neuron i is number first + i * step along the neurons' axis.
        expert: index along a leading axis of experts; None if there is none.
        columns: neurons are the columns of the matrix, not its rows.
    """

    name: str
    count: int
    first: int = 0
    step: int = 1
    expert: int | None = None
    columns: bool = False

    @property
    def picked(self) -> slice:
        """The neurons among all that the matrix holds."""
        return slice(self.first, self.first + (self.count - 1) * self.step + 1, self.step)

    def nbytes(self, info: TensorInfo) -> int:
        """Stored bytes that reading it takes; halves of the same matrix are read with the other half."""
        if self.expert is not None:
            return info.nbytes // info.shape[0]
        if not self.columns and len(info.shape) == 2 and self.step == 1:
            return info.nbytes * self.count // info.shape[0]
        return info.nbytes


@dataclass(frozen=True)
class Cut:
    """One MLP cut out of its tensors: sizes, slabs by role, and the storage in words ("", "stacked, transposed", ...)."""

    d_mlp: int
    d_model: int
    slabs: Mapping[str, Slab]
    storage: str


@dataclass(frozen=True)
class Evidence:
    """What is known of a tower's sizes besides the tensors' own shapes.

    Attributes:
        d_model: width that the config or the norms of the layer say; None if they do not.
        experts: number of experts that the config says, for those that lie below each other.
        expert_layout: the user's word, "rows" or "columns".
        choices: among how many experts the layer's router chooses.
        d_mlp: width of an expert that the config says.
    """

    d_model: int | None = None
    experts: int | None = None
    expert_layout: str | None = None
    choices: int | None = None
    d_mlp: int | None = None


def cut(
    projections: Projections, tensors: Mapping[str, str], infos: Mapping[str, TensorInfo], evidence: Evidence
) -> list[Cut]:
    """The MLPs that a block's tensors hold: one, or one for every expert.

    Args:
        projections: what the names mean.
        tensors: role ("gate", "up", "down", "gate_bias", ...) to tensor name.
        infos: the tensors' shapes.
        evidence: what else is known.

    Raises:
        ShapeMismatch: the tensors do not fit each other.
        LayoutAmbiguous: two readings fit.
        NoExpertsMapped: experts lie below each other and nothing says how many there are.
    """
    shapes = {role: infos[name].shape for role, name in tensors.items()}
    depths = {len(shapes[role]) for role in _ROLES}
    if depths == {3}:
        return list(_stacked(projections, tensors, shapes, infos, evidence))
    if projections.stored == "row-stacked" and depths == {2}:
        return list(_below_each_other(tensors, shapes, evidence))
    if depths != {2} or 0 in (*shapes["gate"], *shapes["down"]):
        raise _misfit(tensors, shapes, projections)
    columns = projections.stored == "columns"
    fitting = _sizes(shapes, projections, (columns, not columns))
    if fitting is None:
        raise _misfit(tensors, shapes, projections)
    slabs = _slabs(tensors, shapes, projections, fitting, (columns, not columns), None)
    return [Cut(*fitting, slabs, "transposed" if columns else "")]


# (gate and up have their neurons in columns, down has).
Reading = tuple[bool, bool]
_ROWS, _COLUMNS = (False, True), (True, False)


def _stacked(
    projections: Projections, tensors: Mapping[str, str], shapes: Mapping[str, Shape],
    infos: Mapping[str, TensorInfo], evidence: Evidence,
) -> Iterator[Cut]:  # fmt: skip
    counts = {shape[0] for role, shape in shapes.items()}
    matrices = {role: shape[1:] for role, shape in shapes.items()}
    if len(counts) > 1 or 0 in (*shapes["gate"], *shapes["down"]):
        raise _misfit(tensors, shapes, projections)
    reading, (d_mlp, d_model) = orientation(projections, tensors, matrices, infos, evidence)
    words = "stacked" if reading == _ROWS else "stacked, transposed" if reading == _COLUMNS else "stacked, mixed"
    for expert in range(counts.pop()):
        slabs = _slabs(tensors, matrices, projections, (d_mlp, d_model), reading, expert)
        yield Cut(d_mlp, d_model, slabs, words)


def orientation(
    projections: Projections,
    tensors: Mapping[str, str],
    matrices: Mapping[str, Shape],
    infos: Mapping[str, TensorInfo],
    evidence: Evidence,
) -> tuple[Reading, tuple[int, int]]:
    """Which axes of stacked experts are neurons: from shapes, and where they leave it open, from what is stated.

    Returns:
        The reading, and (d_mlp, d_model) in it.

    Raises:
        ShapeMismatch, LayoutAmbiguous.
    """
    fitting = {
        reading: sizes
        for reading in product((False, True), (False, True))
        if (sizes := _sizes(matrices, projections, reading)) and evidence.d_model in (None, sizes[1])
    }
    stated = evidence.expert_layout or _stated(projections, tensors, infos)
    wanted = {"rows": _ROWS, "columns": _COLUMNS}.get(stated or "")
    if not fitting or (evidence.expert_layout and wanted not in fitting):
        raise _misfit(tensors, matrices, projections, evidence)
    if wanted is not None and wanted in fitting:
        if len(fitting) == 1 or stated:
            return wanted, fitting[wanted]
    elif len(fitting) == 1:
        return next(iter(fitting.items()))
    names = ", ".join(f"{name!r} {list(infos[name].shape)}" for name in dict.fromkeys(tensors[role] for role in _ROLES))
    readings = " or ".join(
        f"d_model {d_model} and d_mlp {d_mlp} with neurons of gate and up in {_axis(reading[0])}, of down in "
        f"{_axis(reading[1])}"
        for reading, (d_mlp, d_model) in fitting.items()
    )
    raise LayoutAmbiguous(
        f"{names} fit {len(fitting)} readings: {readings}",
        hint="Say `--expert-layout rows` (gate and up are [out, in] and down too, as in a linear layer) or "
        "`--expert-layout columns` (all are [in, out]) if you know",
    )


def _stated(projections: Projections, tensors: Mapping[str, str], infos: Mapping[str, TensorInfo]) -> Storage | None:
    """What format or family say. Blocks of MXFP4 are [out, in] whatever the family stores otherwise."""
    rows_first = infos[tensors["gate"]].rows_first
    if rows_first is not None:
        return "rows" if rows_first else "columns"
    return projections.stored if projections.stored in ("rows", "columns") else None


def _axis(columns: bool) -> str:
    return "columns" if columns else "rows"


def _below_each_other(tensors: Mapping[str, str], shapes: Mapping[str, Shape], evidence: Evidence) -> Iterator[Cut]:
    """Experts as rows of one matrix for each of gate, up and down; so a neuron's value is a row, too."""
    rows, d_model = shapes["gate"]
    if evidence.experts is None:
        raise NoExpertsMapped(
            f"{tensors['gate']!r} holds the experts of a layer below each other, and the config does not say how many",
            hint="The config's number of experts is needed",
        )
    if evidence.choices not in (None, evidence.experts):
        raise ShapeMismatch(
            f"{tensors['gate']!r} would be {evidence.experts} experts below each other, as the config says, but the "
            f"layer's router chooses among {evidence.choices}",
            hint="The config is of another model, or its number of experts is wrong",
        )
    if evidence.d_mlp not in (None, rows // evidence.experts):
        raise ShapeMismatch(
            f"{tensors['gate']!r} {list(shapes['gate'])} would be {evidence.experts} experts of "
            f"{rows // evidence.experts} neurons below each other, but the config says {evidence.d_mlp}",
            hint="The config is of another model, or one of its numbers is wrong",
        )
    if {shapes[role] for role in _ROLES} != {(rows, d_model)} or rows % evidence.experts:
        raise ShapeMismatch(
            f"{', '.join(f'{tensors[role]!r} {list(shapes[role])}' for role in _ROLES)} are not "
            f"{evidence.experts} experts below each other",
            hint="Tensors or the number of experts are of another model: check the files and the config",
        )
    d_mlp = rows // evidence.experts
    for expert in range(evidence.experts):
        slabs = {role: Slab(tensors[role], d_mlp, expert * d_mlp) for role in _ROLES}
        yield Cut(d_mlp, d_model, slabs, "row-stacked")


def _sizes(shapes: Mapping[str, Shape], projections: Projections, reading: Reading) -> tuple[int, int] | None:
    """(d_mlp, d_model) in a reading of the matrices; None if it does not fit."""
    factor = 2 if projections.fused else 1
    gate, down = shapes["gate"], shapes["down"]
    height, width = gate[::-1] if reading[0] else gate
    d_mlp, d_model = down[::-1] if reading[1] else down
    fits = shapes["up"] == gate and width == d_model and height == factor * d_mlp
    return (d_mlp, d_model) if fits else None


def _slabs(
    tensors: Mapping[str, str], shapes: Mapping[str, Shape], projections: Projections,
    sizes: tuple[int, int], reading: Reading, expert: int | None,
) -> dict[str, Slab]:  # fmt: skip
    d_mlp, d_model = sizes
    starts = {None: (0, 0), "gate-first": (0, d_mlp), "up-first": (d_mlp, 0), "interleaved": (0, 1)}[projections.fused]
    step = 2 if projections.fused == "interleaved" else 1
    whole = {
        "gate": Slab(tensors["gate"], d_mlp, starts[0], step, expert, reading[0]),
        "up": Slab(tensors["up"], d_mlp, starts[1], step, expert, reading[0]),
        "down": Slab(tensors["down"], d_mlp, expert=expert, columns=reading[1]),
    }
    for role in _ROLES:
        bias = f"{role}_bias"
        if bias not in tensors:
            continue
        size = d_model if role == "down" else d_mlp * (2 if projections.fused else 1)
        if shapes[bias] != (size,):
            raise ShapeMismatch(
                f"{tensors[bias]!r} is {list(shapes[bias])}, expected [{size}]",
                hint="It belongs to another model or family: check the config and --family",
            )
        part = Slab(tensors[bias], d_model, expert=expert) if role == "down" else whole[role]
        whole[bias] = replace(part, name=tensors[bias], columns=False)
    return whole


def _misfit(
    tensors: Mapping[str, str], shapes: Mapping[str, Shape], projections: Projections, evidence: Evidence | None = None
) -> ShapeMismatch:
    listed = ", ".join(f"{tensors[role]!r} {list(shapes[role])}" for role in _ROLES)
    factor = "2 * " if projections.fused else ""
    stated = ""
    if evidence is not None:  # experts
        width = "" if evidence.d_model is None else f", d_model {evidence.d_model}"
        asked = f" in {evidence.expert_layout}" if evidence.expert_layout else ""
        return ShapeMismatch(
            f"the stacked experts of one layer do not fit each other{asked}{width}: {listed} (without the axis of experts)",
            hint=f"Gate and up must be [{factor}d_mlp, d_model] with down [d_model, d_mlp], or all the other way round",
        )
    if projections.stored == "columns" and {len(shapes[role]) for role in _ROLES} == {2}:
        stated = f"[d_model, {factor}d_mlp] and down [d_mlp, d_model]"
    return ShapeMismatch(
        f"the tensors of one MLP do not fit each other: {listed}",
        hint=f"Gate and up must be {stated or f'[{factor}d_mlp, d_model] and down [d_model, d_mlp]'}",
    )
