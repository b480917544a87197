"""Arguments and options that several commands have.

Options that always go together are the fields of a dataclass. A command takes it as one parameter and is decorated with
`spread`, which shows typer the fields in its place:

    @app.command()
    @spread
    def inspect(model: Model, *, opening: Opening, as_json: AsJson = False) -> None:
        checkpoint = opening.open(model)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Directory, weight file, hub repository or URL.")]
Layers = Annotated[str | None, typer.Option(help='Which layers: "0:8" for 0 to 7, or "0,4,7".')]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to write; made if need be.")]
Seed = Annotated[int, typer.Option(min=0, help="Of everything that is sampled.")]
Samples = Annotated[int | None, typer.Option(min=2, help="Gaussian inputs per layer for the output measures.")]
Exact = Annotated[bool, typer.Option(help="Spectra and tensor asymmetry exactly, whatever that costs on large layers.")]
Figures = Annotated[bool, typer.Option(help="Draw figures and report.html.")]
Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="Begin anew: replace what another run left in DIR, its results or finished parts."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]

# -- how a text is run ---------------------------------------------------------------------------

Text = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|DIR|-|hf:NAME",
        help="The text: a file, a directory of .txt and .md files, standard input, or a dataset of the hub as "
        "hf:NAME[:config][@split][#column]. Without it, the sample that comes with glu-probe.",
    ),
]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.")]
Dtype = Annotated[str, typer.Option(metavar="float32|bfloat16", help="In which precision.")]

# -- how a checkpoint is opened ------------------------------------------------------------------

Family = Annotated[str | None, typer.Option(help="Take this family's rules instead of the config's model_type.")]
FusedLayout = Annotated[
    str | None,
    typer.Option(metavar="gate-first|up-first|interleaved", help="Which half of a fused tensor is the gate."),
]
ActivationName = Annotated[
    str | None, typer.Option("--activation", help="Take this activation instead of the config's.")
]
ExpertLayout = Annotated[
    str | None,
    typer.Option(metavar="rows|columns", help="Whether stacked experts are [out, in] (rows) or [in, out] (columns)."),
]
Download = Annotated[
    bool,
    typer.Option(
        "--download", help="Fetch remote files whole, into the cache, instead of only the bytes that are needed."
    ),
]
FoldNorm = Annotated[bool, typer.Option(help="Fold the gain of the norm before the MLP into query and key.")]
FoldPostNorm = Annotated[bool, typer.Option(help="Fold the gain of a norm on the MLP's output into value.")]


@dataclass(frozen=True)
class Opening:
    """How a checkpoint is opened; the fields are keywords of `open_checkpoint`."""

    family: Family = None
    fused_layout: FusedLayout = None
    activation: ActivationName = None
    expert_layout: ExpertLayout = None
    download: Download = False

    def open(self, model: str) -> Checkpoint:
        """The checkpoint that MODEL names.

        Raises:
            GluProbeError: as `open_checkpoint` does.
        """
        from ..checkpoint.checkpoint import open_checkpoint

        return open_checkpoint(model, **vars(self))


@dataclass(frozen=True)
class Folding(Opening):
    """`Opening` where query, key and value are looked at."""

    fold_norm: FoldNorm = True
    fold_post_norm: FoldPostNorm = False


# -- where it runs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """Where MLPs are measured; the fields are keywords of `probe`."""

    backend: Annotated[
        str,
        typer.Option(metavar="serial|threads|processes|dask|ray", help="Where to measure; it changes no number."),
    ] = "serial"
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="MLPs at once, each in memory of its own; as many as cores by default."),
    ] = None
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Of a running Dask or Ray cluster, as tcp://HOST:8786.")
    ] = None
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Bound on the memory of each worker, as 512MB; it changes no number.")
    ] = "1GB"


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of every dataclass among its parameters in place of that parameter.

    Names, types and defaults of the options are those of the fields. All parameters become keywords, as which typer
    passes them.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: each.annotation for name, each in signature.parameters.items() if is_dataclass(each.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += _options_of(groups[name]) if name in groups else [parameter.replace(kind=_KEYWORD)]

    def gathered(**options: Any) -> None:
        values = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**options, **values)

    out: Any = functools.wraps(command)(gathered)
    out.__signature__ = signature.replace(parameters=parameters)
    out.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    return out


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _options_of(group: type) -> list[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(field.name, _KEYWORD, default=field.default, annotation=types[field.name])
        for field in fields(group)
    ]
