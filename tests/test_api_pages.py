"""`make docs` gives every public name its place; building takes half a minute."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import glu_probe as gp

MODULES = sorted(name for name in gp.__all__ if type(getattr(gp, name)) is type(sys))


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """The pages, built as `make docs` builds them, with every warning an error."""
    pytest.importorskip("pdoc", reason="the group `docs` brings it")
    out = tmp_path_factory.mktemp("pages")
    command = [sys.executable, "-W", "error", "-m", "pdoc", "--docformat", "google", "glu_probe", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def shown(page: Path) -> set[str]:
    """The names that have a section."""
    return {*re.findall(r'<section id="([^"]+)"', page.read_text(encoding="utf-8"))}


@pytest.mark.slow
def test_every_public_name_is_shown(pages):
    assert {*gp.__all__} - {*MODULES} <= shown(pages / "glu_probe.html")
    assert {file.stem for file in (pages / "glu_probe").glob("*.html")} == {*MODULES}
    for name in MODULES:
        module = getattr(gp, name)
        own = [
            entry
            for entry, value in vars(module).items()
            if not entry.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
        public = getattr(module, "__all__", own)
        assert public
        assert {*public} <= shown(pages / "glu_probe" / f"{name}.html"), name


@pytest.mark.slow
def test_lazy_names_come_with_signature_and_docstring(pages):
    text = (pages / "glu_probe.html").read_text(encoding="utf-8")
    section = text.split('<section id="probe">')[1].split("</section>")[0]
    assert "exact" in section
    assert "docstring" in section
