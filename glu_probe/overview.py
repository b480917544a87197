"""Text about a checkpoint: what it holds and how it is read, and whether a check bears that out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from .checkpoint.checkpoint import Checkpoint, spans
from .phrases import counted

if TYPE_CHECKING:
    import pandas as pd

    from .checking import Check
    from .checkpoint.source import TensorInfo

_ROLES = ("gate", "up", "down")


def layout_text(checkpoint: Checkpoint) -> str:
    """What was found, from headers: a paragraph a stack of layers, a line a shape, the tensors of the first MLP of each."""
    provenance, frame = checkpoint.provenance(), checkpoint.describe()
    lines = [f"{provenance['model']}  ({provenance['format']}, model_type {provenance['model_type']})"]
    for tower, facts in provenance["towers"].items():
        lines += [
            f"{tower}:",
            f"  family      {facts['family'] or 'not in the table'}",
            f"  activation  {facts['activation'] or 'unknown'}  ({facts['activation_source']})",
            f"  norm        {facts['norm']}",
        ]
        if facts["post_norm"]:
            lines.append(f"  post-norm   {facts['post_norm']}")
        lines += _shapes(frame[frame["tower"] == tower], checkpoint.source.infos())
    lines.append(f"a run reads {frame['bytes'].sum() / 1e6:,.1f} MB")
    return "\n".join(lines)


def _shapes(part: pd.DataFrame, infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Lines about every kind of MLP of a tower."""
    part = part.assign(kind=part["expert"].map(_kind, na_action=None))
    for (kind, d_mlp, layout, dtype), group in part.groupby(["kind", "d_mlp", "layout", "dtype"], sort=False):
        count = counted(len(group), "layer" if kind == "dense" else "MLP")
        first = group.iloc[0]
        yield (
            f"  {count}  {spans(sorted(set(group['layer'])))}: {kind}, d_model {first['d_model']}, "
            f"d_mlp {d_mlp}, {layout}, {dtype}"
        )
        experts = int((group["layer"] == first["layer"]).sum()) if kind == "routed" else 0
        names = {role: first[role] for role in _ROLES}
        stacked = experts > 1 and (group["gate"] == first["gate"]).sum() > 1
        for name in dict.fromkeys(names.values()):
            roles = " and ".join(role for role in _ROLES if names[role] == name)
            info = infos.get(name)
            sizes = {"experts": experts if stacked else 0, "d_model": int(first["d_model"]), "d_mlp": int(d_mlp)}
            yield f"    {roles:<11} {name}" + (f"  {_axes(info.shape, sizes)}" if info else "")
        if isinstance(first["norm_tensor"], str):
            yield f"    {'norm':<11} {first['norm_tensor']}"


def _kind(expert: object) -> str:
    from .layer_rows import expert_group

    if not isinstance(expert, str):
        return "dense"
    return expert_group(int(expert) if expert.isdigit() else expert)


def _axes(shape: Sequence[int], sizes: Mapping[str, int]) -> str:
    """A shape in numbers and in words.

    >>> _axes((48, 16), {"experts": 0, "d_model": 16, "d_mlp": 24})
    '[48, 16] = [2 d_mlp, d_model]'
    """
    named = {**sizes, "2 d_mlp": 2 * sizes["d_mlp"], "experts x d_mlp": sizes["experts"] * sizes["d_mlp"]}
    words = [" or ".join(name for name, size in named.items() if size == axis) or str(axis) for axis in shape]
    return f"{[*shape]} = [{', '.join(words)}]"


def check_text(check: Check) -> str:
    """The layout, a line for every MLP that was compared, and what follows from them."""
    lines = [layout_text(check.checkpoint), ""]
    said = list(dict.fromkeys(filter(None, check.frame["reason"])))
    if check.reference is None:
        return "\n".join([*lines, f"not compared with transformers' modules: {'; '.join(said)}"])
    lines.append(f"compared with {check.reference}, on random input:")
    cells = [("tower", "layer", "expert", "module", "reads", "error", "exchanged", "with norm", "verdict")]
    for row in check.frame.itertuples():
        verdict = row.verdict + (f" [{said.index(row.reason) + 1}]" if row.reason else "")
        reads = row.fed_by.rpartition(".")[2] or "the stream" if isinstance(row.fed_by, str) else "-"
        errors = (_number(e) for e in (row.relative_error, row.exchanged_error, row.folded_error))
        expert = row.expert if isinstance(row.expert, str) else ""
        cells.append((row.tower, str(row.layer), expert, row.module or "-", reads, *errors, verdict))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    lines += [f"  [{number}] {reason}" for number, reason in enumerate(said, 1)]
    return "\n".join([*lines, "", _conclusion(check.frame)])


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.1e}"


def _conclusion(frame: pd.DataFrame) -> str:
    from .comparison import TOLERANCE

    counts = {
        verdict: int((frame["verdict"] == verdict).sum()) for verdict in ("reproduced", "mismatch", "not compared")
    }
    if counts["mismatch"]:
        return (
            f"{counts['mismatch']} of {len(frame)} MLPs are not what the model computes: "
            "measures of this checkpoint, read like this, are not the model's"
        )
    if not counts["reproduced"]:
        return "nothing could be compared: the layout above is what was found, and no more"
    left = f"; {counts['not compared']} could not be compared" if counts["not compared"] else ""
    return (
        f"{counts['reproduced']} of {len(frame)} MLPs are reproduced by their factors (relative error below "
        f"{TOLERANCE:g}), and not with gate and up exchanged{left}"
    )
