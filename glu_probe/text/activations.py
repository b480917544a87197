"""The measures of the weight report on real activations: one run over a text, joined to the report's frames.

A first pass over a part of the text (every fourth sequence) finds the canonical gauge of the sample for each neuron; the main pass
sums over all of it. So exchange is the operation in the gauge that this text calls for, not in that of isotropic input: on
text the sign of E[ab] is often not that of the cosine between the weights.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.in_memory import checkpoint_in_memory
from ..checkpoint.sites import Site
from ..errors import BadOption, NoTokenizer, TextTooShort
from ..phrases import counted
from ..probing import probe
from ..report import Report
from ..selection import select_layers
from .columns import Measured, refuse_other_rows, with_text_layers, with_text_neurons
from .contexts import Neurons, TopContexts, choose_neurons
from .language_model import LanguageModel
from .moments import GROUPS, GaugeMoments, NeuronMoments, OutputMoments
from .texts import read_texts
from .tokenizers import load_tokenizer
from .tokenizing import tokenize
from .tokens import Tokens

_GAUGE_SHARE = 4
# Outputs are whole vectors, and cost as much as the MLP itself: on long texts a part of the tokens, spread over all of it.
_OUTPUT_TOKENS, _OUTPUT_SHARE, _SHORT = 4096, 4, 1024
BATCH_TOKENS = 1024
# The gauge and the shares are fitted to every neuron. To one position they fit exactly: nothing is asymmetric, nothing residual.
# Of SiLU neurons with unrelated branches, 32 positions give an exchange asymmetry a third too low, 256 an eighth, 1024 a
# fifteenth (test_few_positions_are_fitted_too_well): below the first nothing is measured, below the last a note says so.
LEAST_POSITIONS, _FEW_POSITIONS = 32, 1024
_SUMS_COST = 1.3  # of a batch in the main pass, over one in the pass for the gauge

Progress = Callable[[Iterable[Any]], Iterable[Any]]


def probe_text(
    model: str | os.PathLike | Checkpoint | torch.nn.Module,
    text: Any = None,
    *,
    layers: Iterable[int] | str | None = None,
    tokens: int | None = 16_384,
    length: int = 256,
    first_position: bool = False,
    contexts: int = 0,
    neurons: Neurons = None,
    device: str | None = None,
    dtype: str | None = None,
    module: torch.nn.Module | None = None,
    tokenizer: Any = None,
    report: Report | Callable[[], Report] | None = None,
    progress: Progress = iter,
    estimate: Callable[[float], object] | None = None,
    **options: Any,
) -> Report:
    """Measure the gated MLPs of a language model on a text, beside their measures on Gaussian input.

    Args:
        model: a reference as `open_checkpoint` takes it, an opened checkpoint, or a model in memory (of transformers, or a
            TransformerBridge), whose own tensors are then measured, edits since it was loaded included.
        text: what `read_texts` takes: a file, a directory, a list of texts, "-" for standard input, "hf:NAME" for a
            dataset, None for the sample that comes with the package.
        layers: which layers; all by default.
        tokens: at most so many; None for all.
        length: tokens of a sequence.
        first_position: let the first position of every sequence take part. Models park a massive activation there,
            which would be most of many neurons' energy.
        contexts: keep so many top contexts of each sign quadrant of some neurons.
        neurons: which; see `choose_neurons`. By default the 3 of each MLP with the largest output energy.
        device, dtype: where and in which precision a model that is loaded runs ("cpu" by default; "float32" by
            default, or "bfloat16"). One in memory runs as it is.
        module: a model in memory to run, where factors are to come from `model`, a reference or checkpoint.
        tokenizer: a transformers tokenizer; else the model's own. A transformers model in memory needs it.
        report: the weight report of the same layers, or what makes it once the model is known to run; else it is made.
        progress: wraps the iteration over batches of sequences.
        estimate: called after the first batch with the seconds that the run will take, about.
        **options: of `open_checkpoint`, if `model` is no opened checkpoint.

    Returns:
        The report with further columns, and with `contexts` if they were asked for. In the neuron frame `X_text`, its
        standard error `X_text_se` and its difference `X_text_minus_gaussian` for the five measures of Gaussian input,
        `output_energy_text`, and gate_mean, gate_std, gate_active, branch_correlation and the frequencies of the four
        sign quadrants, all with suffix `_text`. In the layer frame their means (`X_text_mean` with its error, and
        `X_text_weighted` by output energy on the text), and the asymmetries of the output with standard errors
        (`X_output_text`, `X_output_text_se`). MLPs that cannot be listened to have them missing, and a note says so.

    Raises:
        NotRunnable: the model cannot be run, or nothing in these layers can be listened to.
        FactorsDisagree: what the factors compute is not what the model computes.
        ModelTooLarge, NoTokenizer, TextTooShort, TextUnreadable, BadOption: and other subclasses of GluProbeError.
    """
    if contexts < 0 or (neurons is not None and not contexts):
        raise BadOption(f"contexts is {contexts}", hint="Give how many contexts of each quadrant to keep, at least 1")
    checkpoint, module = opened(model, module, options)
    runner, sequences = text_model(
        checkpoint, text, tokens=tokens, length=length, device=device, dtype=dtype, module=module, tokenizer=tokenizer,
        suits=lambda found: refuse_few(found, first_position),
    )  # fmt: skip
    try:
        present = {layer for layers in checkpoint.layers_present.values() for layer in layers}
        chosen = select_layers(layers, sorted(present))
        sites = runner.heard(chosen)
        agreement = runner.check(sequences.sequences[0][None], sites)
        report = probe(checkpoint, layers=layers) if report is None else report() if callable(report) else report
        refuse_other_rows(report.neurons, sites)
        top = TopContexts(choose_neurons(neurons, report.neurons, sites), contexts) if contexts else None
        measured = measure(
            runner, sites, sequences, first_position=first_position, top=top, progress=progress, estimate=estimate
        )
        facts = {
            **sequences.words(),
            "first_position": first_position,
            "device": str(runner.device),
            "dtype": str(runner.dtype).removeprefix("torch."),
            "gauge": f"canonical of the sample, from every {_GAUGE_SHARE}th sequence",
            "largest_disagreement": max(agreement.values()),
            "mlps": len(sites),
        }
        notes = _notes(runner, chosen, sequences, first_position)
    finally:
        runner.release()
    with_text = with_text_neurons(report.neurons, measured)
    return dataclasses.replace(
        report,
        neurons=with_text,
        layers=with_text_layers(report.layers, with_text, measured),
        contexts=None if top is None else top.frame(checkpoint.name, sequences, runner.tokenizer),
        provenance=report.provenance | {"text": facts, "notes": [*report.provenance.get("notes", ()), *notes]},
    )


def measure(
    runner: LanguageModel,
    sites: Sequence[Site],
    tokens: Tokens,
    *,
    first_position: bool = False,
    top: TopContexts | None = None,
    progress: Progress = iter,
    estimate: Callable[[float], object] | None = None,
) -> dict[Site, Measured]:
    """Run a text and measure these MLPs; see `probe_text`.

    Args:
        runner: the model; its `listen`, `value` and `checkpoint` are used.
        sites: MLPs that it can listen to.
        tokens: the text.
        first_position, progress, estimate: see `probe_text`.
        top: filled with contexts, if given.
    """
    first, count = 0 if first_position else 1, len(tokens.sequences)
    gauges = {site: GaugeMoments(site.d_mlp) for site in sites}
    some = tokens.split_every(_GAUGE_SHARE)[1] if count >= _GAUGE_SHARE else tokens
    steps = [("gauge", batch) for batch in some.batches(BATCH_TOKENS)]
    steps += [("sums", batch) for batch in tokens.batches(BATCH_TOKENS)]
    cost = sum(ids.numel() * (_SUMS_COST if phase == "sums" else 1.0) for phase, (_, ids) in steps)
    stride = max(1, min(_OUTPUT_SHARE, tokens.n_tokens // _SHORT), tokens.n_tokens // _OUTPUT_TOKENS)
    moments: dict[Site, tuple[NeuronMoments, OutputMoments]] = {}
    # a sequence whose only token is its first has nothing to say
    heard = [index for index, ids in enumerate(tokens.sequences) if len(ids) > first]
    group_of = {index: place * GROUPS // len(heard) for place, index in enumerate(heard)}

    def find_gauge(site: Site, a: torch.Tensor, b: torch.Tensor) -> None:
        gauges[site].update(_flat(a, first), _flat(b, first))

    started = time.perf_counter()
    for number, (phase, (indices, ids)) in enumerate(progress(steps)):
        if phase == "gauge":
            runner.listen(ids, sites, find_gauge)
            if number == 0 and estimate is not None:
                estimate((time.perf_counter() - started) * cost / ids.numel())
            continue
        if not moments:
            for site in sites:
                moments[site] = _start(runner, site, gauges[site].gauge(), top)

        def add(site: Site, a: torch.Tensor, b: torch.Tensor, indices: list[int] = indices) -> None:
            for row, index in enumerate(indices):
                # contiguous groups: neighbouring sequences are of one document, and depend on each other
                one, other = _flat(a[row : row + 1], first), _flat(b[row : row + 1], first)
                moments[site][0].update(one, other, group_of[index])
                moments[site][1].update(one[::stride], other[::stride], group_of[index])
                if top is not None:
                    top.update(site, one, other, index, first)

        runner.listen(ids, sites, add)
    return {site: Measured(neurons.estimates(), outputs.estimates()) for site, (neurons, outputs) in moments.items()}


def _start(
    runner: LanguageModel, site: Site, gauge: torch.Tensor, top: TopContexts | None
) -> tuple[NeuronMoments, OutputMoments]:
    act = runner.activation(site)
    if top is not None and site in top.chosen:
        top.start(site, act, gauge)
    return NeuronMoments(act, gauge), OutputMoments(act, gauge, runner.value(site).float())


def _flat(branch: torch.Tensor, first: int) -> torch.Tensor:
    """[batch, position, d_mlp] without leading positions, as tokens, in at least float32."""
    return branch[:, first:].reshape(-1, branch.shape[-1]).float()


# -- what is run ----------------------------------------------------------------------------------


def text_model(
    checkpoint: Checkpoint,
    text: Any,
    *,
    tokens: int | None,
    length: int,
    device: str | None = None,
    dtype: str | None = None,
    module: torch.nn.Module | None = None,
    tokenizer: Any = None,
    suits: Callable[[Tokens], object] | None = None,
) -> tuple[LanguageModel, Tokens]:
    """The model that runs and the text as it reads it; see `probe_text` for the arguments.

    The text comes first: what is wrong with it is said before a model is loaded. `suits` is called with it then, and
    raises what it has against it. Who is done with a model in memory calls `release`.
    """
    tokenizer = _tokenizer(checkpoint, module, tokenizer)
    documents = read_texts(text)
    sequences = tokenize(documents, tokenizer, length=length, tokens=tokens, max_length=_positions(checkpoint.config))
    if suits is not None:
        suits(sequences)
    if module is None:
        runner = LanguageModel.load(checkpoint, device=device or "cpu", dtype=dtype or "float32", tokenizer=tokenizer)
    else:
        _refuse_other_place(module, device, dtype)
        runner = LanguageModel.wrap(module, checkpoint, tokenizer=tokenizer)
    size = runner.bridge.original_model.config.get_text_config().vocab_size
    largest = max(int(ids.max()) for ids in sequences.sequences)
    if largest >= size:
        runner.release()
        raise BadOption(
            f"the tokenizer gives id {largest}, and the model knows {size} tokens",
            where=checkpoint.name, hint="Give the tokenizer that the model was trained with",
        )  # fmt: skip
    return runner, sequences


def refuse_few(tokens: Tokens, first_position: bool, what: str = "the text") -> None:
    """Make sure that what is fitted to every neuron has positions enough.

    Raises:
        TextTooShort: fewer than `LEAST_POSITIONS` take part.
    """
    found = tokens.n_positions(0 if first_position else 1)
    if found < LEAST_POSITIONS:
        left_out = "" if first_position else ", the first of every sequence left out"
        raise TextTooShort(
            f"{what} is too short: only {counted(found, 'position')} of {counted(len(tokens.sequences), 'sequence')} can be used"
            f"{left_out}, and what is fitted to every neuron needs {LEAST_POSITIONS}",
            hint="Give more text, or more tokens of it" + ("" if first_position else "; longer sequences lose fewer"),
        )


def opened(
    model: Any, module: torch.nn.Module | None, options: dict[str, Any]
) -> tuple[Checkpoint, torch.nn.Module | None]:
    """The checkpoint of what `probe_text` takes as a model, and the model in memory that is to run, if there is one."""
    if isinstance(model, torch.nn.Module):
        if module is not None:
            raise BadOption("two models in memory are given", hint="Give the one to measure as the first argument only")
        return checkpoint_in_memory(model, **options), model
    if not isinstance(model, Checkpoint):
        return open_checkpoint(model, **options), module
    if options:
        raise BadOption(
            f"{', '.join(sorted(options))} given for a checkpoint that is already open",
            hint="Give them to open_checkpoint",
        )
    return model, module


def _refuse_other_place(module: torch.nn.Module, device: str | None, dtype: str | None) -> None:
    """A model in memory runs as it is: other wishes are refused, not forgotten."""
    weight = next(module.parameters())
    is_on, is_in = str(weight.device), str(weight.dtype).removeprefix("torch.")
    for name, wanted, found in (("device", device, is_on), ("dtype", dtype, is_in)):
        if wanted is not None and wanted not in (found, found.split(":")[0]):
            raise BadOption(
                f"{name} is {wanted!r}, and the model in memory is {'on' if name == 'device' else 'in'} {found}",
                hint="Move or convert it with model.to(...)",
            )


def _tokenizer(checkpoint: Checkpoint, module: Any, tokenizer: Any) -> Any:
    if tokenizer is not None:
        return tokenizer
    if module is None or checkpoint.in_files:
        return load_tokenizer(checkpoint.ref)
    own = getattr(module, "tokenizer", None)  # of a bridge
    if own is None:
        raise NoTokenizer("a model in memory comes without its tokenizer", hint="Give it with tokenizer=")
    return own


def _positions(config: Mapping[str, Any]) -> int | None:
    """How many positions the model has, where its config says."""
    text = config.get("text_config")
    found = (text if isinstance(text, Mapping) else config).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _notes(runner: LanguageModel, layers: set[int], tokens: Tokens, first_position: bool) -> list[str]:
    """What a reader of the measures on text should know."""
    notes = []
    for reason in dict.fromkeys(runner.skipped.values()):
        places = [s for s, why in runner.skipped.items() if why == reason and s.layer in layers]
        if places:
            plural = "MLP was" if len(places) == 1 else "MLPs were"
            notes.append(f"{len(places)} {plural} not measured on text: {reason}")
    if len(tokens.sequences) < GROUPS:
        notes.append(
            f"the text is {counted(len(tokens.sequences), 'sequence')} long: standard errors on text are "
            + ("missing" if len(tokens.sequences) < 2 else "rough")
        )
    found = tokens.n_positions(0 if first_position else 1)
    if found < _FEW_POSITIONS:
        notes.append(
            f"{found} positions of the text take part: the gauge is fitted to so few, and asymmetries on text come out too low"
        )
    return notes
