"""What does a causal sweep cost, against plain forward passes?

One intervention in every layer in turn needs, done plainly, a forward pass per layer. Replaying only the layers from the
edited one on saves half of their part; the head, a fifth of a small model's arithmetic, is computed every time, and the
comparison of distributions comes on top. Plain passes run between the steps of the sweep, so that both meet the same
machine; only the ratio means anything.

    python analyses/bench/causal.py                                   # SmolLM2-135M from PyPI
    python analyses/bench/causal.py MODEL --tokens 4096 --interventions exchange,zero_ablation
"""

from __future__ import annotations

import argparse
import time

import torch

import glu_probe as gp
from glu_probe.text.activations import text_model
from glu_probe.text.causal import causal
from glu_probe.text.runs import BATCH_TOKENS


class Plain:
    """Plain forward passes with their loss, between the steps of a sweep."""

    def __init__(self, model: str, length: int) -> None:
        """Load a second copy of the model."""
        checkpoint = gp.open_checkpoint(model)
        self._runner, text = text_model(checkpoint, None, tokens=BATCH_TOKENS, length=length)
        self._ids = next(text.batches(BATCH_TOKENS))[1]
        self.depth, self.spent = len(self._runner.bridge.blocks), []
        self.run()
        self.spent.clear()

    def run(self) -> None:
        """One more."""
        started = time.perf_counter()
        logits = self._runner.logits(self._ids)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), self._ids[:, 1:].flatten())
        self.spent.append((time.perf_counter() - started) / self._ids.numel())


class Watch:
    """Wraps the steps of a sweep: times them, and lets a plain pass run after each."""

    def __init__(self, plain: Plain) -> None:
        self._plain, self.seconds = plain, 0.0

    def __call__(self, steps):
        """The steps."""
        started = time.perf_counter()
        for step in steps:
            yield step
            self.seconds += time.perf_counter() - started
            self._plain.run()
            started = time.perf_counter()


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

    plain = Plain(model, options.length)
    watch, started = Watch(plain), time.perf_counter()
    frame = causal(
        model, interventions=names, tokens=options.tokens, calibration=options.tokens, length=options.length,
        spare=options.spare, progress=watch,
    )  # fmt: skip
    tokens = int(frame["n_tokens"].iloc[0] + frame["n_sequences"].iloc[0])
    forward, sweeps = sum(plain.spent) / len(plain.spent) * tokens, len(names) * (2 if options.spare else 1)
    rest = time.perf_counter() - started - watch.seconds - forward * plain.depth
    one = watch.seconds / sweeps
    print(f"{torch.get_num_threads()} threads, {plain.depth} layers, {tokens} tokens in sequences of {options.length}")
    print(f"a plain forward pass with its loss: {forward:.2f} s")
    print(f"a sweep of one intervention: {one:.1f} s = {one / forward / plain.depth:.3f} x layers forward passes")
    print(f"loading, calibration and the clean run: {rest:.1f} s, once for all {sweeps} sweeps")


if __name__ == "__main__":
    main()
