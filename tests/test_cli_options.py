"""What commands share: option groups become single options and are whole; the directory that is written to."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from glu_probe import open_checkpoint
from glu_probe.cli import app, application
from glu_probe.cli.options import Folding, Opening, spread
from glu_probe.cli.saving import output_directory


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(min=1)] = 2
    height: int = 3


def test_a_group_becomes_its_fields_in_its_place():
    seen = []

    @spread
    def command(name: str, *, first: bool = False, size: Size, last: float = 1.5) -> None:
        """Words."""
        seen.append((name, first, size, last))

    assert list(inspect.signature(command).parameters) == ["name", "first", "width", "height", "last"]
    assert command.__doc__ == "Words."
    one = typer.Typer(add_completion=False)
    one.command()(command)
    run = CliRunner().invoke
    assert run(one, ["a"]).exit_code == 0
    assert run(one, ["b", "--height", "7", "--first", "--last", "2"]).exit_code == 0
    assert seen == [("a", False, Size(2, 3), 1.5), ("b", True, Size(2, 7), 2.0)]
    assert run(one, ["c", "--width", "0"]).exit_code == 2
    assert len(seen) == 2


def test_the_options_of_opening_are_all_that_open_checkpoint_has():
    keywords = {name: each.default for name, each in inspect.signature(open_checkpoint).parameters.items()}
    del keywords["ref"]
    assert {field.name: field.default for field in fields(Folding)} == keywords


@pytest.mark.parametrize(("command", "group"), [
    ("inspect", Opening), ("check", Opening), ("causal", Opening), ("neuron", Folding), ("find", Folding), ("report", Folding),
    ("activations", Folding), ("compare", Folding),
])  # fmt: skip
def test_commands_have_the_options_of_their_group_and_no_others_of_opening(command, group):
    options = [parameter.name for parameter in typer.main.get_command(app).commands[command].params]
    assert [name for name in options if name in {field.name for field in fields(Folding)}] == [
        field.name for field in fields(group)
    ]


def test_help_lists_every_command_in_the_order_of_use():
    group = typer.main.get_command(app)
    assert group.list_commands(typer.Context(group)) == [*application.ORDER]


def test_a_home_directory_is_expanded_and_not_left_behind_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))

    def fail() -> None:
        with output_directory(Path("~/out"), "report", after_failure=lambda: "nothing"):
            assert (tmp_path / "out").is_dir()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []
