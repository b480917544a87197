"""The pages in docs/ say what the code does: every error has its section, every link a target, every example a meaning."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import yaml

import glu_probe as gp
from glu_probe import errors
from glu_probe.checkpoint.families import FAMILIES
from glu_probe.measures.io_classes import IO_CLASSES, IO_CONDITIONS, io_class
from glu_probe.measures.registry import MEASURES
from glu_probe.page.words import WORDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
CLASSES = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.GluProbeError)]


def sections(page: Path, level: int) -> dict[str, str]:
    """Heading -> what stands below it."""
    _, *parts = re.split(rf"^{'#' * level} (.+)\n", page.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def literals() -> str:
    """The constant parts of every string of the package, a line each."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "glu_probe").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


ERRORS = sections(ROOT / "docs" / "errors.md", 3)


def test_every_error_has_a_section_in_the_order_of_the_module():
    assert list(ERRORS) == [each.__name__ for each in CLASSES]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_section_has_symptom_cause_fix_and_the_exit_code(kind):
    text = ERRORS[kind.__name__]
    assert re.findall(r"^\*\*(\w+)\.\*\* \S", text, re.M) == ["Symptom", "Cause", "Fix"]
    if "never raised as itself" not in text:
        assert ("Exit code 3." in text) == (kind.exit_code == 3)


def test_the_messages_that_are_quoted_are_those_of_the_code():
    said = literals()
    quoted = [
        (name, piece.strip())
        for name, text in ERRORS.items()
        for quote in re.findall(r"`([^`]+)`", text.split("**Symptom.**")[1].split("**Cause.**")[0])
        for piece in quote.split("...")
        if len(piece.strip()) > 2 and not quote.startswith("--")
    ]
    assert len(quoted) > 60
    assert not [(name, piece) for name, piece in quoted if piece not in said]


def test_every_error_says_what_to_do():
    """Wherever one is made it has a hint."""
    without = []
    for file in (ROOT / "glu_probe").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if made and node.func.id in ERRORS and not {None, "hint"} & {each.arg for each in node.keywords}:
                without.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not without


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_have_targets(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_the_pages_parses_and_names_what_there_is(page):
    """Every `gp.` name in them must exist, with the keywords given; test_examples.py runs them."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and _dotted(node).startswith("gp."):
                _found(_dotted(node))
            if isinstance(node, ast.Call) and _dotted(node.func).startswith("gp."):
                called = _found(_dotted(node.func))
                taken = inspect.signature(called).parameters
                if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
                    assert {each.arg for each in node.keywords} <= {*taken, None}, ast.unparse(node)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _found(dotted: str):
    found = gp
    for name in dotted.split(".")[1:]:
        found = getattr(found, name)
    return found


def test_the_glossary_has_the_names_of_gate_up_and_down_in_every_family():
    """A reader looks a tensor's name up and finds which branch it is."""
    rows = {
        cells[0]: set(re.findall(r"`([^`]+)`", " ".join(cells[1:])))
        for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and (cells := [cell.strip() for cell in line.strip("|").split("|")])
    }
    layouts = [layout for family in FAMILIES for layout in family.layouts]
    for factor in ("gate", "up", "down"):
        assert {getattr(each, factor) for each in layouts if each.fused is None} <= rows[factor], factor
    orders = {"gate-first": "gate first", "up-first": "up first", "interleaved": "rows take turns"}
    for name, order in {(each.gate, each.fused) for each in layouts if each.fused is not None}:
        assert name in rows[f"gate and up, {orders[order]}"], (name, order)


def test_the_glossary_has_every_word_of_the_page():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").lower()
    assert not [word for word in WORDS if f"**{word}**" not in text]


def test_the_classes_of_the_glossary_are_those_of_the_measure():
    """The table, read as it is meant, gives every neuron the class that the measure gives it."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").split("| class |")[1].split("\n\n")[0]
    lines = [line.replace("\\|", "¦").strip("|").split("|") for line in text.splitlines()[2:]]
    rows = [[cell.strip().replace("¦", "|") for cell in line] for line in lines]
    assert {name: tuple("" if cell == "-" else cell for cell in cells) for name, *cells in rows} == IO_CONDITIONS
    assert [name for name, *_ in rows] == [*IO_CONDITIONS]
    fits = {
        "> ½": lambda x: x > 0.5, "< −½": lambda x: x < -0.5, "≤ ½": lambda x: x <= 0.5, "|·| > ½": lambda x: abs(x) > 0.5,
        "|·| ≤ ½": lambda x: abs(x) <= 0.5, "-": lambda x: True,
    }  # fmt: skip
    grid = [-1.0, -0.6, -0.5, -0.2, 0.0, 0.3, 0.5, 0.7, 1.0]
    found = set()
    for kv, qv, qk in itertools.product(grid, grid, grid[4:]):
        (said, *_) = (
            name for name, *cells in rows if all(fits[c](x) for c, x in zip(cells, (kv, qv, qk), strict=False))
        )
        (index,) = io_class(*(np.array([value]) for value in (qk, kv, qv)))
        assert said == IO_CLASSES[index], (kv, qv, qk)
        found.add(said)
    assert found == {*IO_CLASSES}


def test_the_citation_is_complete_and_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= {*cited}  # what the format requires
    assert cited["cff-version"] == "1.2.0"
    assert [f"Copyright (c) 2026 {each['name']}" in (ROOT / "LICENSE").read_text() for each in cited["authors"]] == [
        True
    ]
    assert (cited["version"], cited["license"], cited["title"]) == (version("glu-probe"), "MIT", "glu-probe")
    for each in cited["references"]:
        assert {"type", "title", "authors"} <= {*each}


def test_contributing_names_files_and_tests_that_there_are():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tests = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    assert not [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests]
    paths = re.findall(r"\b((?:glu_probe|tests|docs|analyses)/[\w/]+\.\w+)", text)
    assert len(paths) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]
    targets = re.findall(r"^make (\w+)", text, re.M)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)]


def test_the_glossary_names_measures_that_there_are():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:Columns?|[.;,]|^) `([a-z]+_\w+)`", text.split("## The model")[1], re.M)) - {"ls"}
    suffixes = r"_(mean|median|q05|q95|weighted|null_mean|null_std|effect|text|relu_ratio|output)$"
    assert named
    assert {re.sub(suffixes, "", name) for name in named} <= {re.sub(suffixes, "", name) for name in MEASURES}
