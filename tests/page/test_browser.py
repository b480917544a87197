"""The page in a browser, where there is one: it opens without complaint, its pictures show, its tables sort."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import subprocess
from itertools import pairwise

import pytest

import glu_probe as gp

from ..support import write_llama
from .reports import deep, mixture, with_contexts

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

# Clicks every head twice, notes what stands in the column, and leaves all of it in the page.
PROBE = """
<script>
addEventListener("load", () => {
  const column = (table, index) => [...table.tBodies[0].rows].map((row) => row.cells[index].textContent);
  const heads = (table) => [...table.tHead.rows[0].cells];
  const found = { tables: {}, images: [...document.images].map((image) => [image.alt, image.naturalWidth, image.width]) };
  for (const table of document.querySelectorAll("table.sortable")) {
    found.tables[table.id] = heads(table).map((head, index) => {
      const button = head.querySelector("button"), seen = { before: column(table, index), rows: table.tBodies[0].rows.length };
      button.focus();
      seen.focused = document.activeElement === button;
      for (const way of ["up", "down"]) {
        button.click();
        seen[way] = column(table, index);
        seen[way + "Sort"] = heads(table).map((one) => one.getAttribute("aria-sort"));
      }
      return seen;
    });
  }
  found.hint = document.querySelector(".hint").hidden;
  found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>
"""


def browse(path, directory, *options: str) -> subprocess.CompletedProcess:
    """The browser on a file, without a window and without a network."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
         f"--user-data-dir={directory / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=10000", *options,
         path.as_uri()],
        capture_output=True, text=True, timeout=180, check=False, env=os.environ | {"HOME": str(directory)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def opened(page: str, directory, *options: str) -> tuple[str, list[str]]:
    """The DOM once the page is loaded, and what the browser wrote to its console."""
    path = directory / "page.html"
    path.write_text(page, encoding="utf-8")
    done = browse(path, directory, "--dump-dom", *options)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


def looked_at(page: str, directory, *options: str) -> dict:
    dom, console = opened(page.replace("</body>", PROBE + "</body>"), directory, *options)
    assert console == []
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.S)[1]))


def number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def in_order(cells: list[str], descending: bool) -> bool:
    """Whether cells are sorted, numbers by size, and what is missing stands last."""
    known = [text for text in cells if text not in ("", "–")]
    if cells[: len(known)] != known:
        return False
    keys = [number(text) for text in known]
    if None in keys:
        return True  # the order of words is asserted where it is known
    return all((a >= b) if descending else (a <= b) for a, b in pairwise(keys))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    return with_contexts(gp.probe(write_llama(tmp_path_factory.mktemp("browser") / "llama"))).to_html()


@pytest.fixture(scope="module")
def found(page, tmp_path_factory) -> dict:
    return looked_at(page, tmp_path_factory.mktemp("open"))


def test_pictures_show(found):
    assert len(found["images"]) == 13
    for name, natural, shown in found["images"]:
        assert natural > 400, name
        assert shown > 300, name


def test_every_column_of_every_table_sorts_both_ways(found):
    assert set(found["tables"]) == {"layers", "neurons", "contexts", "measures", "classes"}
    for name, columns in found["tables"].items():
        for index, seen in enumerate(columns):
            where = f"{name}, column {index}"
            assert seen["focused"], where
            assert sorted(seen["up"]) == sorted(seen["down"]) == sorted(seen["before"]), where
            assert in_order(seen["up"], descending=False), where
            assert in_order(seen["down"], descending=True), where
            others = ["none"] * (len(columns) - 1)
            for way in ("ascending", "descending"):
                expected = [*others[:index], way, *others[index:]]
                assert seen["upSort" if way == "ascending" else "downSort"] == expected, where


def test_order_of_values_that_are_hard_to_sort(found):
    value, name, same = found["tables"]["contexts"]
    assert value["up"] == ["-1.5e-07", "2", "2", "10", "3e+10", "inf", "–"]
    assert value["down"] == ["inf", "3e+10", "10", "2", "2", "-1.5e-07", "–"]
    assert name["up"] == ["<i>", "A", "ä", "b2", "b2", "b10", "–"]
    assert name["down"] == ["b10", "b2", "b2", "ä", "A", "<i>", "–"]
    assert same["up"] == ["1"] * 7


def test_layers_sort_by_their_numbers(found):
    layer = found["tables"]["layers"][0]
    assert layer["down"] == [str(layer) for layer in reversed(range(12))]
    assert layer["up"] == layer["before"]
    ratio = found["tables"]["layers"][2]
    assert not math.isclose(float(ratio["up"][0]), float(ratio["up"][-1]))


def test_the_hint_is_for_those_with_scripts(page, found):
    assert found["hint"] is False
    assert '<span class="hint" hidden>' in page


@pytest.mark.parametrize("width", [500, 1200])
def test_the_page_is_as_wide_as_the_window(page, tmp_path, width):
    assert looked_at(page, tmp_path, f"--window-size={width},900")["wide"] == 0


def test_a_mixture_of_experts_opens_in_the_dark(tmp_path):
    seen = looked_at(mixture(tmp_path / "model").to_html(), tmp_path, "--blink-settings=preferredColorScheme=0")
    assert len(seen["images"]) == 15
    group = seen["tables"]["layers"][1]
    assert group["up"] == ["dense", *["routed"] * 4, *["shared"] * 4]


@pytest.mark.parametrize(("scheme", "shown"), [(0, {True: "brightness(0.9)", False: "invert(0.91) hue-rotate(180deg)"}),
                                               (1, {True: "none", False: "none"})])  # fmt: skip
def test_in_the_dark_lines_are_turned_round_and_shades_are_not(page, tmp_path, scheme, shown):
    script = """<script>addEventListener("load", () => {
      const pre = document.createElement("pre");
      pre.id = "found";
      pre.textContent = JSON.stringify([...document.querySelectorAll("figure")].map(
        (one) => [one.id, one.classList.contains("shaded"), getComputedStyle(one.querySelector("img")).filter]));
      document.body.append(pre);
    });</script>"""
    dom, _ = opened(
        page.replace("</body>", script + "</body>"), tmp_path, f"--blink-settings=preferredColorScheme={scheme}"
    )
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.S)[1]))
    assert {name for name, shaded, _ in found if shaded} >= {"phase_diagram", "heatmap", "neuron_scatter"}
    assert len({shaded for _, shaded, _ in found}) == 2
    assert all(css == shown[shaded] for _, shaded, css in found), found


def test_a_complaint_would_be_seen(page, tmp_path):
    _, console = opened(page.replace("</body>", "<script>no_such_name();</script></body>"), tmp_path)
    assert any("no_such_name" in line for line in console)


def test_printed_tables_repeat_their_heads(tmp_path):
    from pypdf import PdfReader

    report = deep(tmp_path / "model")
    (tmp_path / "page.html").write_text(report.to_html(), encoding="utf-8")
    browse(tmp_path / "page.html", tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'page.pdf'}")
    sheets = [sheet.extract_text() for sheet in PdfReader(tmp_path / "page.pdf").pages]
    heads = [re.match(r"\s*layer\s+n_\s*neurons", text) is not None for text in sheets]
    (first,) = (number for number, text in enumerate(sheets) if text.startswith("Tables"))
    assert "tensor_" in sheets[first]
    assert heads[first + 1]
    # every row of the table is on one of these sheets, whole
    rows = {line.split()[0] for text in sheets[first : first + 3] for line in text.splitlines() if line.count(" ") > 10}
    assert {str(layer) for layer in range(80)} <= rows
