"""The command line: thin. Every command parses, calls one public function and prints.

Results go to standard output, progress and notes to standard error. Exit codes: 0 done, 2 bad input, 3 a model that is
not supported, 130 interrupted. A command lives in the file named after what it makes and imports what it needs when it
runs, so that --help costs nothing.
"""

from __future__ import annotations

import sys

import typer

from ..errors import GluProbeError
from .application import app
from .causal_costs import causal
from .comparisons import compare
from .found_neurons import find
from .inspection import check, inspect
from .listings import ls
from .neuron_cards import neuron
from .reports import demo, plot, report
from .text_reports import activations


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
