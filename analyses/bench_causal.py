"""What does a causal sweep cost, against plain forward passes?

One intervention in every layer in turn needs, done plainly, a forward pass per layer. Replaying only the layers from the
edited one on saves half of their part; the head, which is a fifth of a small model's arithmetic, is computed every
time, and the comparison of distributions comes on top. All times are of one run, the plain passes measured before and
after the sweep on the same batches; only ratios mean anything.

    python analyses/bench_causal.py                                   # SmolLM2-135M from PyPI
    python analyses/bench_causal.py MODEL --tokens 4096 --interventions exchange,zero_ablation
"""

from __future__ import annotations

import argparse
import time

import torch

import glu_probe as gp
from glu_probe.text.activations import text_model
from glu_probe.text.causal import causal
from glu_probe.text.runs import BATCH_TOKENS


def plain_seconds(model: str, tokens: int, length: int) -> tuple[float, int]:
    """Seconds a token of a forward pass with its loss, the best of three, and the number of layers."""
    checkpoint = gp.open_checkpoint(model)
    runner, text = text_model(checkpoint, None, tokens=tokens, length=length)
    ids = next(text.batches(BATCH_TOKENS))[1]
    spent = []
    for _ in range(3):
        started = time.perf_counter()
        logits = runner.logits(ids)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        spent.append(time.perf_counter() - started)
        del logits
    return min(spent) / ids.numel(), len(runner.bridge.blocks)


class Watch:
    """A progress bar that only looks at the clock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, steps):
        """The steps, timed."""
        started = time.perf_counter()
        yield from steps
        self.seconds = time.perf_counter() - started


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="by default SmolLM2-135M from PyPI")
    parser.add_argument("--tokens", type=int, default=2048, help="of the evaluation text, and of the calibration text")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--interventions", default="exchange")
    parser.add_argument("--spare", type=int, default=0)
    options = parser.parse_args()
    model = options.model or gp.sample_models.fetch(gp.sample_models.SMOLLM2)
    names = options.interventions.split(",")

    before, depth = plain_seconds(model, options.tokens, options.length)
    watch, started = Watch(), time.perf_counter()
    frame = causal(
        model, interventions=names, tokens=options.tokens, calibration=options.tokens, length=options.length,
        spare=options.spare, progress=watch,
    )  # fmt: skip
    whole = time.perf_counter() - started
    after, _ = plain_seconds(model, options.tokens, options.length)
    tokens = int(frame["n_tokens"].iloc[0] + frame["n_sequences"].iloc[0])
    plain, runs = (before + after) / 2 * tokens, len(names) * (2 if options.spare else 1)
    print(f"{torch.get_num_threads()} threads, {depth} layers, {tokens} tokens in sequences of {options.length}")
    print(
        f"a plain forward pass with its loss: {plain:.2f} s (before {before * tokens:.2f}, after {after * tokens:.2f})"
    )
    print(
        f"a sweep of one intervention over all layers: {watch.seconds / runs:.1f} s "
        f"= {watch.seconds / runs / plain / depth:.3f} x layers forward passes"
    )
    print(f"with loading, calibration and the clean run: {whole:.1f} s for {runs} sweeps")


if __name__ == "__main__":
    main()
