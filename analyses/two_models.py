"""Where do a small LLaMA and a small Gemma sit between bilinear and ReLU?

SmolLM2-135M (SwiGLU) has gate scales around 1: its neurons are about 58 % as asymmetric under exchange as ReLU neurons with
the same directions would be, and the bilinear product carries about 69 % of their energy. Gemma 3 270M (GeGLU) has gate
scales from 3 to 31: for all its measures the gate is a ReLU. In both, gate and up rows of one neuron are more aligned than
mismatched rows of the same layer, and the gate matrix has the lower stable rank in every layer.

    python analyses/two_models.py [--out DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import glu_probe as gp
from glu_probe.sample_models import GEMMA3, SMOLLM2, fetch


def main() -> None:
    """Print the findings on both models; with --out, save their reports too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="save the reports below this directory")
    options = parser.parse_args()
    for sample in (SMOLLM2, GEMMA3):
        report = gp.probe(fetch(sample))
        print(f"\n{sample.name}")
        print("\n".join(f"  {sentence}" for sentence in report.findings))
        if options.out is not None:
            report.save(options.out / sample.name)


if __name__ == "__main__":
    main()
