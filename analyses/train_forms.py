"""Does breaking the symmetry of bilinear attention help a small transformer?

N. Breslow (arXiv 2606.22172) conjectures that it does. Not so here, once the nonlinearity is held fixed: the form that
keeps exchange and scaling (s outside the product, rank-1) came out ahead of the gated one that breaks exchange, for
SiLU and for ReLU, at every one of six seeds, by 0.03 nats per token, which is about what six seeds can tell from 0.
Against the plain bilinear form, s outside the product helped both times; inside, SiLU helped less and ReLU not
measurably. Two layers of width 96, one pass over one book: this says what happens there, and nothing about large
models.

    validation loss, nats per token, with 95 % intervals over seeds; the difference is over pairs of the same seed

    form               loss              bits per byte   minus gated silu
    rank-1 silu        3.257 +- 0.015    1.512           -0.030 +- 0.024
    standard gelu      3.260 +- 0.016    1.514           -0.027 +- 0.014
    gated silu         3.287 +- 0.023    1.526
    rank-1 relu        3.289 +- 0.013    1.527           +0.002 +- 0.024
    gated gelu         3.298 +- 0.021    1.531           +0.011 +- 0.008
    bilinear           3.308 +- 0.012    1.536           +0.021 +- 0.020
    gated relu         3.322 +- 0.026    1.542           +0.035 +- 0.018
    rank-2 bilinear    3.325 +- 0.025    1.544           +0.038 +- 0.037
    rank-4 bilinear    3.342 +- 0.014    1.552           +0.055 +- 0.019

    contrast                           difference          lower loss at
    gated silu - rank-1 silu           +0.030 +- 0.024     0 of 6 seeds
    gated relu - rank-1 relu           +0.033 +- 0.033     0
    gated silu - bilinear              -0.021 +- 0.020     5
    gated relu - bilinear              +0.014 +- 0.029     2
    rank-1 silu - bilinear             -0.051 +- 0.008     6
    rank-1 relu - bilinear             -0.019 +- 0.009     6
    rank-2 bilinear - bilinear         +0.017 +- 0.021     1
    rank-4 bilinear - bilinear         +0.034 +- 0.020     0

Gated SiLU is ahead of the bilinear form, which taken alone would look like the conjecture; its control is further
ahead. Fewer neurons of higher rank did worse than more of rank 1. No run diverged. In training the gated neurons
became more symmetric under exchange, not less (mean asymmetry on Gaussian input 0.115 to 0.073 for SiLU, 0.161 to
0.098 for GELU, 0.200 to 0.118 for ReLU): |q| began at 1 and ended at 1.03 to 1.15, while |cos(q, k)| rose from 0.08 to
0.24-0.27, with 0.09 for mismatched rows. It rose as much in the forms that are symmetric by construction, to 0.22-0.30.

Limits. The intervals are over seeds alone and stand for one contrast at a time. Corrected for all eight (Bonferroni),
only rank-1 SiLU and rank-1 ReLU against bilinear are clear of 0. The learning rate was tuned on a grid of factor 2,
with one seed and half the steps. Every form chose 0.008, between its neighbours; but a step on that grid costs 0.03 to
0.16, as much as the forms differ or more, and the order of gated and rank-1 turns around at 0.004 for SiLU (by 0.006)
and at 0.016 for ReLU (by 0.057). Weight decay acts on the factors as they are written, so it chooses among factors
that a symmetry makes equal.

How: a decoder with RMSNorm and rotary positions, 418 thousand parameters. Every MLP has 73,728, or 0.3 % more (rank 2)
or 0.4 % less (rank 4), and starts with the same mean square of its output. Byte-level BPE of 1,024 tokens on the King
James Bible in blocks of 25 paragraphs: of 20 blocks 18 train, one chooses the learning rate, and one is scored, at the
end. AdamW, 1,180 steps of 1,024 tokens, each seen once at most. Models of a seed share their batches and all weights
but the MLPs'.

    python analyses/train_forms.py --out analyses/results/train_forms --figures analyses/figures

About half an hour on two idle cores, by the time of a step. Every run is a single thread and repeats to the last bit
on the same machine. Stopped, it goes on from `runs.jsonl` in --out, which can be deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from form_tables import write_results
from small_transformer import SPECS, Recipe, SmallTransformer, Training, evaluate, train
from text_splits import Corpus, king_james
from torch import nn

import glu_probe as gp
from glu_probe.conversions import gated_to_layer
from glu_probe.forms import GatedMLP, MLPForm, RankOneBilinearMLP

CHECKPOINTS = (0.0, 0.02, 0.1, 0.25, 0.5, 1.0)  # shares of a final run at which symmetry is measured


@dataclass(frozen=True)
class Run:
    """One training: of which form, why, and how."""

    purpose: str  # "tune" or "final"
    form: str
    rate: float
    seed: int
    steps: int


@dataclass(frozen=True)
class Plan:
    """Which trainings there are.

    Attributes:
        forms: names in `SPECS`.
        rates: learning rates that every form is tuned over.
        extensions: how often the grid may grow by one step of a factor 2, where the best rate is at its edge.
        tune_seed, tune_steps: of the tuning runs.
        seeds, steps: of the final ones.
    """

    forms: tuple[str, ...] = tuple(SPECS)
    rates: tuple[float, ...] = (4e-3, 8e-3, 1.6e-2)
    extensions: int = 2
    tune_seed: int = 1000
    tune_steps: int = 590
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    steps: int = 1180


QUICK_PLAN = Plan(forms=("bilinear", "rank-1 silu", "gated silu"), extensions=1, tune_steps=10, seeds=(0, 1), steps=20)
QUICK_RECIPE = Recipe(d_model=48, context=64, vocabulary=512)


def perform(run: Run, recipe: Recipe, corpus: Corpus) -> dict:
    """Train one model and say all that is to be known of it, as plain values.

    Tuning runs are scored on the tuning part, final ones on the validation part.
    """
    model = SmallTransformer(recipe, SPECS[run.form], corpus.vocabulary, run.seed)
    marks = {round(share * run.steps): share for share in CHECKPOINTS} if run.purpose == "final" else {}
    measures: list[dict] = []

    def measure(step: int) -> None:
        if step in marks:
            measures.extend({"step": step, **row} for row in symmetry_rows(model, run.seed))

    training = train(model, corpus, recipe, rate=run.rate, steps=run.steps, seed=run.seed, at_step=measure)
    part = "tune" if run.purpose == "tune" else "validation"
    loss = float("nan") if training.diverged else evaluate(model, corpus.tokens[part], recipe)
    mlp = model.blocks[0].mlp
    return {
        **asdict(run),
        "loss": loss,
        "bits_per_byte": corpus.bits_per_byte(loss, part),
        "diverged": not math.isfinite(loss),
        **stability(training, run.steps),
        "seconds": training.seconds,
        "d_mlp": mlp.d_mlp,
        "mlp_parameters": mlp.parameter_count,
        "mlp_flops_per_token": mlp.flops_per_token,
        "model_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "measures": measures,
    }


def stability(training: Training, steps: int) -> dict[str, float]:
    """How calm a training was.

    Returns:
        train_loss: mean over the last twentieth of the steps.
        largest_rise: the most that the loss, in means over a hundredth of the steps, ever rose above its lowest so far.
        largest_gradient_norm: before clipping, after the first twentieth.
    """
    width = max(1, steps // 100)
    whole = len(training.losses) // width * width
    smooth = np.array(training.losses[:whole]).reshape(-1, width).mean(1)
    tail = max(1, steps // 20)
    return {
        "train_loss": float(np.mean(training.losses[-tail:])),
        "largest_rise": float(np.max(smooth - np.minimum.accumulate(smooth), initial=0.0)),
        "largest_gradient_norm": max(training.gradient_norms[tail:], default=float("nan")),
    }


def symmetry_rows(model: SmallTransformer, seed: int) -> list[dict]:
    """Symmetry measures of every layer as it is now; none for forms without one query and key a neuron.

    The gain of the norm in front is folded in. Rank-1 symmetric forms have directions and the size |q||k| only: |q|
    alone is no property of theirs, and their asymmetries are 0 by construction.
    """
    return [
        {"layer": index, **row}
        for index, block in enumerate(model.blocks)
        if (row := _symmetry(block.mlp, block.mlp_norm.weight, index, seed))
    ]


def _symmetry(mlp: MLPForm, gain: nn.Parameter, index: int, seed: int) -> dict[str, float]:
    gated = isinstance(mlp, GatedMLP)
    if not (gated or isinstance(mlp, RankOneBilinearMLP)):
        return {}
    form = mlp if gated else GatedMLP.from_factors("linear", **mlp.factors)
    layer = gated_to_layer(form, gain, layer=index)
    measured = gp.measure_layer(layer, seed=seed, samples=64)
    row = {
        "abs_cos_qk": np.nanmean(measured.neurons["abs_cos_qk"]),
        "abs_cos_qk_null": np.nanmean(measured.nulls["abs_cos_qk"]),
        "qk_norm": (layer.query.norm(dim=1) * layer.key.norm(dim=1)).median().item(),
    }
    if gated:
        row["query_norm"] = np.nanmedian(measured.neurons["query_norm"])
        for name in ("exchange_asymmetry", "scaling_asymmetry", "bilinear_share"):
            row[name] = np.nanmean(measured.neurons[name])
    return {name: float(value) for name, value in row.items()}


class Journal:
    """Results on disk, a JSON line each, so that an analysis that was stopped goes on where it was.

    Only results of the same recipe, text and torch are taken up again.
    """

    def __init__(self, path: Path, recipe: Recipe, corpus: Corpus) -> None:
        self.path = path
        stamp = {"recipe": asdict(recipe), "text": corpus.sha256, "torch": torch.__version__}
        self.stamp = json.loads(json.dumps(stamp))
        self.results: dict[Run, dict] = {}
        kept = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # the last line of a run that was killed
                continue
            kept.append(line)
            if entry["stamp"] == self.stamp:
                self._take(entry["result"])
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".partial")
        scratch.write_text("".join(line + "\n" for line in kept))
        os.replace(scratch, path)

    def _take(self, result: dict) -> None:
        self.results[Run(**{name: result[name] for name in Run.__dataclass_fields__})] = result

    def add(self, result: dict) -> None:
        """Keep a result, on disk before anything else."""
        with self.path.open("a") as file:
            file.write(json.dumps({"stamp": self.stamp, "result": result}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(result)


_in_worker: tuple[Recipe, Corpus]


def _start_worker(recipe: Recipe, corpus: Corpus) -> None:
    global _in_worker
    torch.set_num_threads(1)  # also what makes a training repeat to the last bit
    _in_worker = recipe, corpus


def _work(run: Run) -> dict:
    return perform(run, *_in_worker)


def perform_all(runs: Iterable[Run], journal: Journal, pool: ProcessPoolExecutor) -> list[dict]:
    """Results of these runs, from the journal or from the workers."""
    runs = list(dict.fromkeys(runs))
    futures = [pool.submit(_work, run) for run in runs if run not in journal.results]
    for future in as_completed(futures):
        result = future.result()
        journal.add(result)
        print(
            f"{time.strftime('%H:%M:%S')} {result['purpose']:5} {result['form']:16} rate {result['rate']:.4f} "
            f"seed {result['seed']:4} loss {result['loss']:.4f} ({result['seconds']:.0f} s)",
            flush=True,
        )
    return [journal.results[run] for run in runs]


def tuned_rates(plan: Plan, journal: Journal, pool: ProcessPoolExecutor) -> tuple[pd.DataFrame, dict[str, float]]:
    """Every form's loss at every learning rate, and the rate of the lowest.

    A diverged run counts as the worst. Where the best rate is at the edge of a form's grid, the grid grows there.
    """
    grids = {form: sorted(plan.rates) for form in plan.forms}
    for extension in range(plan.extensions + 1):
        results = perform_all(
            (Run("tune", form, rate, plan.tune_seed, plan.tune_steps) for form, grid in grids.items() for rate in grid),
            journal,
            pool,
        )
        frame = pd.DataFrame(results)
        best = {form: best_rate(group) for form, group in frame.groupby("form")}
        grown = {form: extended(grid, best[form]) for form, grid in grids.items()}
        if grown == grids or extension == plan.extensions:
            break
        grids = grown
    return frame, best


def best_rate(group: pd.DataFrame) -> float:
    """The learning rate of the lowest loss."""
    return float(group["rate"].iloc[group["loss"].fillna(np.inf).argmin()])


def extended(grid: Sequence[float], best: float) -> list[float]:
    """The grid, with half its lowest or twice its highest rate where that one is best."""
    below = [grid[0] / 2] if best == grid[0] else []
    above = [grid[-1] * 2] if best == grid[-1] else []
    return [*below, *grid, *above]


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, train, and write the frames and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the frames and of runs.jsonl")
    parser.add_argument(
        "--figures", type=Path, default=None, help="directory of the figures; that of the frames by default"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--text", type=Path, default=None, help="a UTF-8 text to use instead of the King James Bible")
    parser.add_argument(
        "--quick", action="store_true", help="three forms, a few steps: shows that it works, nothing else"
    )
    options = parser.parse_args(arguments)
    plan, recipe = (QUICK_PLAN, QUICK_RECIPE) if options.quick else (Plan(), Recipe())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if options.text is not None and not options.text.is_file():
        parser.error(f"{options.text}: no such file")
    text = king_james() if options.text is None else options.text.read_text(encoding="utf-8")
    corpus = Corpus.of(text, recipe.vocabulary)
    for part, tokens in corpus.tokens.items():
        if len(tokens) <= recipe.context:
            parser.error(
                f"the text's {part} part has {len(tokens)} tokens, too few for a window of {recipe.context + 1}"
            )
    journal = Journal(options.out / "runs.jsonl", recipe, corpus)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, spawn, _start_worker, (recipe, corpus)) as pool:
        tuning, best = tuned_rates(plan, journal, pool)
        finals = perform_all(
            (Run("final", form, best[form], seed, plan.steps) for seed in plan.seeds for form in plan.forms),
            journal,
            pool,
        )
    write_results(tuning, best, pd.DataFrame(finals), options.out, options.figures or options.out)


if __name__ == "__main__":
    main()
