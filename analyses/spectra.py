"""Is the gate matrix really of lower rank than the up matrix, and where does the down matrix stand?

Yes, it is, and not for one common direction. In SmolLM2-135M-Instruct the gate has the lower rank of the two in all 30
layers by each of four counts: stable rank 0.49 (0.44 to 0.55) times that of the up matrix, and without the largest
direction still 0.62 (0.58 to 0.67); participation ratio 0.83 (0.79 to 0.86); effective rank, to which the many small
directions matter most, only 0.99 (0.99 to 0.99). In Gemma 3 270M the stable rank is lower in all 18 layers, 0.76 (0.64
to 0.86), the others in 14 of 18, 0.92 (0.87 to 0.97) for the participation ratio; after adjustment for twelve
comparisons those sign tests do not stand (p 0.25). There the gain of the norm, which both matrices share, covers the
difference: without it (`--without-gain`) the gate is lower in all 18 layers by all four, its stable rank 0.49 (0.40 to
0.59) times the other.

Against the down matrix there is no such rule. By stable rank SmolLM2's gate is no lower, 0.92 (0.76 to 1.12) and 16 of
30 layers; by effective rank it is, 0.96 (0.95 to 0.97) and 29 of 30. In Gemma the down matrix has by far the most
directions, since the gain narrows what gate and up read: effective rank of the gate 0.67 (0.59 to 0.76) times that of
down, 18 of 18.

    python analyses/spectra.py [MODEL...] [--out analyses/results/spectra] [--figures analyses/figures]

All singular values of the three matrices of every layer, the norm's gain folded in and rows scaled to norm 1, so that
no choice of coordinates enters. Four counts of directions: stable rank (sum p^2 / max p^2), participation ratio ((sum
p^2)^2 / sum p^4), effective rank (Roy & Vetterli 2007: exp of the entropy of p / sum p), and the stable rank of what
is left without the largest direction. They are compared in pairs of one layer, by the mean of the log ratio with an
interval over layers, and by a sign test, whose p is adjusted for all comparisons of one model (Holm).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from study import (
    arguments,
    axes_grid,
    bootstrap,
    colored,
    finish,
    holm,
    one_line_errors,
    opened,
    show,
    sign_test,
    write,
)

import glu_probe as gp
from glu_probe.errors import BadOption

MATRICES = {"gate": "query", "up": "key", "down": "value"}
RANKS = ("stable_rank", "participation_ratio", "effective_rank", "stable_rank_without_first")


def singular_values(rows: torch.Tensor) -> np.ndarray:
    """Of a matrix [d_mlp, d_model] with its rows scaled to norm 1, descending; zero rows are left out."""
    rows = rows.double()
    norms = rows.norm(dim=1, keepdim=True)
    unit = rows[norms[:, 0] > 0] / norms[norms[:, 0] > 0]
    # squares from the Gram matrix: relative errors of 1e-8 in small values, far below what is told apart here
    return np.sqrt(torch.linalg.eigvalsh(unit.T @ unit).clamp(min=0).numpy()[::-1])


def ranks(values: np.ndarray) -> dict[str, float]:
    """The four counts of directions of a matrix with these singular values, descending."""
    squares = values**2
    rest = squares[1:]
    return {
        "stable_rank": float(squares.sum() / squares[0]),
        "participation_ratio": float(squares.sum() ** 2 / (squares**2).sum()),
        "effective_rank": float(gp.measures.effective_rank(values)),
        "stable_rank_without_first": float(rest.sum() / rest[0]) if rest.size and rest[0] > 0 else float("nan"),
    }


def layer_frame(checkpoint: gp.Checkpoint) -> pd.DataFrame:
    """A row per layer and matrix: its four ranks, and the share of the largest direction in its squares.

    Raises:
        BadOption: there is no gated MLP, or several to a layer.
    """
    rows = []
    for layer in checkpoint.layers():
        for matrix, factor in MATRICES.items():
            values = singular_values(getattr(layer, factor))
            share = float(values[0] ** 2 / (values**2).sum())
            rows.append({"layer": layer.layer, "matrix": matrix, **ranks(values), "first_share": share})
    frame = pd.DataFrame(rows)
    if frame.empty or frame.duplicated(["layer", "matrix"]).any():
        raise BadOption(f"{checkpoint.name} has not one gated MLP a layer", hint="Give a model that has")
    return frame


def comparisons(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per pair of matrices and rank: mean log ratio over layers with its interval, and the sign test.

    Args:
        frame: of `layer_frame`, of one model.
    """
    rows = []
    for rank in RANKS:
        table = frame.pivot(index="layer", columns="matrix", values=rank)
        for first, second in combinations(MATRICES, 2):
            difference = np.log(table[first] / table[second]).to_numpy()
            above, of, p = sign_test(difference)
            mean = bootstrap(np.mean, difference)
            rows.append(
                {
                    "rank": rank,
                    "first": first,
                    "second": second,
                    "first_mean": table[first].mean(),
                    "second_mean": table[second].mean(),
                    # of the geometric means
                    **{name: float(np.exp(value)) for name, value in mean.columns("ratio").items()},
                    "first_lower": of - above,
                    "layers": of,
                    "sign_test_p": p,
                }
            )
    return pd.DataFrame(rows).assign(p_adjusted=lambda table: holm(table["sign_test_p"]))


def figure(layers: pd.DataFrame) -> Figure:
    """A row per model, a panel per rank, a line per matrix."""
    models = list(colored(layers))
    drawn, axes = axes_grid(len(models), len(RANKS), (14, 2.9 * len(models)))
    for row, (model, part, _) in zip(axes, models, strict=True):
        for panel, rank in zip(row, RANKS, strict=True):
            for matrix, style in zip(MATRICES, ("-", "--", ":"), strict=True):
                one = part[part["matrix"] == matrix]
                panel.plot(one["layer"], one[rank], style, label=matrix, color="0.2" if style == ":" else None)
            panel.set(title=rank.replace("_", " "), xlabel="layer")
            panel.set_ylim(bottom=0)
            finish(panel)
        row[0].set_ylabel(model)
        row[0].legend(frameon=False, fontsize="small")
    return drawn


def main(given: Sequence[str] | None = None) -> None:
    """Print, and with --out and --figures write, frames and figure."""
    parser = arguments(__doc__, saved_reports=False)
    parser.add_argument(
        "--without-gain", action="store_true", help="leave the gain of the norm in front out of gate and up"
    )
    options = parser.parse_args(given)
    with one_line_errors(parser):
        layers, tests = [], []
        for model in options.models:
            name, checkpoint = opened(model, fold_norm=not options.without_gain)
            layers.append(layer_frame(checkpoint).assign(model=name))
            tests.append(comparisons(layers[-1]).assign(model=name))
            show(name, tests[-1].drop(columns="model"))
        layers, tests = pd.concat(layers, ignore_index=True), pd.concat(tests, ignore_index=True)
        write(options, {"layers": layers, "comparisons": tests}, "spectra", lambda: figure(layers))


if __name__ == "__main__":
    main()
