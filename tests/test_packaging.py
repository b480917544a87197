"""What is built and installed: the wheel has all it needs and nothing else, and works away from the sources.

The building is slow and works without network: it takes the setuptools that is here.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


def imported() -> set[str]:
    """Top-level modules that the package imports when it runs, wherever in a file."""
    found = set()
    for file in (ROOT / "glu_probe").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        blocks = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ]
        for_checkers = {id(node) for block in blocks for node in ast.walk(block)}
        for node in ast.walk(tree):
            if id(node) in for_checkers:
                continue
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
    return found - {"glu_probe", *sys.stdlib_module_names}


def test_what_is_imported_is_declared():
    """Not left to what another dependency happens to bring."""
    declared = [*PROJECT["project"]["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]
    names = {canonicalize_name(Requirement(each).name) for each in declared}
    extras = {extra for each in declared for extra in Requirement(each).extras}
    distributions = packages_distributions()
    for module in imported():
        owners = {canonicalize_name(name) for name in distributions.get(module, [module])}
        assert owners & names or module in extras, module


def test_every_extra_is_tested_and_documented():
    tested = {str(Requirement(each)) for each in PROJECT["dependency-groups"]["test"]}
    said = "".join(
        (ROOT / page).read_text(encoding="utf-8") for page in ("docs/models.md", "docs/runs.md", "docs/text.md")
    )
    for extra, needs in EXTRAS.items():
        assert {str(Requirement(each)) for each in needs} <= tested, extra
        assert f'pip install ".[{extra}]"' in said, extra


def test_no_page_takes_it_from_an_index():
    """There is none that has it: of that name there could be something else one day."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    for page in pages:
        assert not re.search(r"pip install [^`\n]*glu-probe", page.read_text(encoding="utf-8")), page.name


def test_hints_name_extras_that_there_are():
    text = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "glu_probe").rglob("*.py"))
    assert {*re.findall(r"glu-probe\[([\w-]+)\]", text)} <= {*EXTRAS}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A directory with the wheel and the sdist, the wheel made from the sdist."""
    pytest.importorskip("build", reason="the group `test` brings it")
    here = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, here)
    for name in ("glu_probe", "tests"):
        shutil.copytree(ROOT / name, here / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", here / "dist", here],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return here / "dist"


def package_files() -> set[str]:
    """Everything in the package's directory, as the sources have it."""
    found = (file for file in (ROOT / "glu_probe").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(ROOT).as_posix() for file in found}


@pytest.mark.slow
def test_the_wheel_has_the_whole_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == package_files()
    assert {Path(name).suffix for name in names} == {".py", ".typed", ".jinja", ".css", ".js", ".txt"}
    assert "glu_probe/text/sample.txt" in names


@pytest.mark.slow
def test_the_wheel_says_what_it_is(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        read = {
            name.split(".dist-info/")[1]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert read["licenses/LICENSE"] == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert {*re.findall(r"^Provides-Extra: (.+)$", read["METADATA"], re.M)} == {*EXTRAS}
    assert "glu-probe = glu_probe.cli:main" in read["entry_points.txt"]


@pytest.mark.slow
def test_the_sdist_has_what_the_wheel_is_made_of(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """An environment with the wheel and, by way of a .pth file, the libraries of this one; editable installs are not seen."""
    where = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", where], check=True)
    (wheel,) = built.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", where / "bin" / "python", "install", "-q", "--no-deps", "--no-index", wheel],
        check=True,
    )  # fmt: skip
    (site,) = where.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    return where


def run(installed: Path, *command: object, cwd: Path) -> str:
    """Standard output of a program of the environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COLUMNS")}
    done = subprocess.run(
        [installed / "bin" / str(command[0]), *map(str, command[1:])],
        capture_output=True, text=True, check=False, cwd=cwd, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_installed_command_works_away_from_the_sources(installed, tmp_path):
    found = run(installed, "python", "-c", "import glu_probe; print(glu_probe.__file__)", cwd=tmp_path).strip()
    assert Path(found).is_relative_to(installed)
    assert PROJECT["project"]["version"] in run(installed, "glu-probe", "--version", cwd=tmp_path)
    families = json.loads(run(installed, "glu-probe", "ls", "families", "--json", cwd=tmp_path))
    assert "llama" in json.dumps(families)


@pytest.mark.slow
def test_the_installed_demo_writes_its_report(installed, tmp_path):
    run(installed, "glu-probe", "demo", "-o", "report", cwd=tmp_path)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "<style" in page
    assert "<script" in page
    assert (tmp_path / "report" / "figures" / "phase_diagram.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_installed_sample_text_is_read(installed, tmp_path):
    code = "from glu_probe.text.texts import read_texts; print(len(''.join(map(str, read_texts(None)))))"
    assert int(run(installed, "python", "-c", code, cwd=tmp_path)) > 1000
