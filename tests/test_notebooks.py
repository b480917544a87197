"""What notebooks must be like to be kept: without outputs, clients of public names, ready for a hosted notebook."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import glu_probe as gp

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
INSTALL = """# Where glu-probe is missing: installs it from the clone of its repository in which this notebook lies.
import importlib.util

if importlib.util.find_spec("glu_probe") is None:
    %pip install -q .."""

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def code(path: Path) -> ast.Module:
    """All but the first cell, whose magic is no Python."""
    return ast.parse("\n".join("".join(cell["source"]) for cell in code_cells(path)[1:]))


def chain(node: ast.AST) -> list[str]:
    """Names of gp.a.b as [gp, a, b]; empty if it does not begin with a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else []), *reversed(names)]


def private_names(tree: ast.Module) -> list[str]:
    """What a notebook takes from the package that is no public name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "glu_probe":
            names = [alias.name for alias in node.names]
            found += names if node.module != "glu_probe" else [name for name in names if name not in gp.__all__]
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("glu_probe.")]
        names = chain(node) if isinstance(node, ast.Attribute) else []
        if names[:1] == ["gp"]:
            module = gp
            for name in names[1:]:  # gp.x, and x of gp.figures.x; what comes after is an attribute of a value
                if name not in getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")]):
                    found.append(".".join(names))
                    break
                module = getattr(module, name)
                if not hasattr(module, "__path__") and type(module).__name__ != "module":
                    break
    return found


def test_there_are_five():
    assert [path.stem for path in NOTEBOOKS] == ["bring_your_own_model", "causal", "compare", "quickstart", "theory"]


@every_notebook
def test_outputs_are_stripped(path):
    for cell in code_cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@every_notebook
def test_the_first_cell_installs_only_what_is_missing(path):
    assert "".join(code_cells(path)[0]["source"]) == INSTALL


@every_notebook
def test_public_names_only(path):
    assert private_names(code(path)) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from glu_probe.neurons import GatedLayer", ["GatedLayer"]),
        ("import glu_probe.probing", ["glu_probe.probing"]),
        ("gp.figures.no_such_figure(1)", ["gp.figures.no_such_figure"]),
        ("gp.probing", ["gp.probing"]),
        ("gp.figures._few", ["gp.figures._few"]),
        ("gp.figures.model_profiles; gp.probe(x).layers; gp.sample_models.SMOLLM2; gp.GluProbeError", []),
    ],
)
def test_private_names_are_found(source, found):
    assert private_names(ast.parse(source)) == found


@every_notebook
def test_no_paths_of_a_machine(path):
    assert not re.findall(r"/(?:home|Users|root|work|tmp|content)/", path.read_text(encoding="utf-8"))


def test_readme_names_every_notebook():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"notebooks/{path.name}" not in readme] == []
