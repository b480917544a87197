"""The typer application on which every command registers itself, and the options in front of a command."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

ORDER = ("inspect", "check", "report", "activations", "causal", "neuron", "find", "compare", "plot", "ls", "demo")

typed: list[str] = []  # the arguments of the command that runs


class Commands(TyperGroup):
    """Commands as --help lists them: from a first look to the details, whichever file was imported first."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in `ORDER`; one that is missing there is an error."""
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    name="glu-probe",
    cls=Commands,
    help="How asymmetric are the gate and up branches of gated MLPs (SwiGLU, GeGLU, ReGLU)?\n\n"
    "MODEL is a directory with config.json, a .safetensors, .gguf or .bin file, a hub repository as org/name, "
    "org/name@revision or hf://org/name@revision/file, or a URL of such files. Add --debug anywhere for a traceback.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
