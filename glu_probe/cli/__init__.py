"""The command line: thin. Every command parses, calls one public function and prints.

Results go to standard output, progress and notes to standard error. Exit codes: 0 done, 2 bad input, 3 a model that is
not supported, 130 interrupted. A command lives in the file named after what it makes and imports what it needs when it
runs, so that --help costs nothing.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any, NoReturn, cast

import typer

from ..errors import BadOption, GluProbeError
from . import application
from .application import app
from .causal_costs import causal
from .comparisons import compare
from .found_neurons import find
from .inspection import check, inspect
from .listings import ls
from .neuron_cards import neuron
from .reports import demo, plot, report
from .text_reports import activations

_UsageError = cast(
    "type[Exception]", typer.BadParameter.__base__
)  # of click, or of the copy of it that typer brings along


def main(argv: list[str] | None = None) -> None:
    """Entry point: errors of this package become one line and a hint; anything else is a bug and keeps its traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a console that lacks a letter gets a question mark, not a crash
            stream.reconfigure(errors="replace")
    application.typed[:] = arguments
    try:
        code = app(arguments, prog_name="glu-probe", standalone_mode=False)
    except GluProbeError as error:
        _explain(error, debug)
    except _UsageError as error:
        _explain(_refused(error), debug)
    except typer.Abort:
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(0)
    else:
        sys.exit(code or 0)


def _explain(error: GluProbeError, debug: bool) -> NoReturn:
    """Say what is wrong, and what to do; stop with the code of the error."""
    if debug:
        traceback.print_exception(error)
    where = f"{error.where}: " if error.where else ""
    typer.echo(f"error: {type(error).__name__}: {where}{error.what}", err=True)
    if error.hint:
        typer.echo(f"hint: {error.hint}", err=True)
    sys.exit(error.exit_code)


def _refused(error: Any) -> BadOption:
    """What typer has against the arguments, as an error of this package. Without any arguments it shows the help, and stops."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    command = error.ctx.command_path if error.ctx else "glu-probe"
    what = " ".join(error.format_message().split()).rstrip(".")
    refused = BadOption(f"{what[:1].lower()}{what[1:]}", hint=f"`{command} --help` has the arguments and options")
    refused.__cause__ = error
    return refused
