"""The report page in a real browser: no error, every plot drawn, hover and keys work, light, dark,
phone and print.
"""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from fedensemble.report.html import write_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("CHROMIUM") or next(
    (found for name in NAMES if (found := shutil.which(name))), None
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium; set CHROMIUM to its path")

LISTEN = "<script>window.errors = []; window.addEventListener('error', (e) => errors.push(e.message));</script>"
CHECK = """<script>
window.addEventListener("load", () => {
  const tip = document.getElementById("tip"), silent = [], undrawn = [], outside = [], mute = [];
  const crossed = [];
  const plots = [...document.querySelectorAll("svg.chart")];
  const send = (svg, kind, x, y) => svg.dispatchEvent(new PointerEvent(kind, { clientX: x, clientY: y }));
  const shown = () => !tip.hidden && tip.textContent.length > 3 && !/undefined|NaN|null/.test(tip.textContent);
  for (const svg of plots) {
    svg.scrollIntoView({ behavior: "instant", block: "center" });
    const box = svg.getBoundingClientRect();
    const shapes = [...svg.querySelectorAll(".line, .band, .bar, .dot, .cell, .reach")].map((e) => e.getBBox());
    if (box.width < 100 || box.height < 60 || !shapes.some((b) => b.width + b.height > 0)) undrawn.push(svg.id);
    const upright = svg.querySelector("text.label[transform]"), around = upright && upright.getBoundingClientRect();
    for (const text of upright ? svg.querySelectorAll("text:not(.label)") : []) {
      const b = text.getBoundingClientRect();
      if (b.left < around.right && b.right > around.left && b.top < around.bottom && b.bottom > around.top)
        crossed.push(`${svg.id} ${text.textContent}`);
    }
    let found = false;
    for (let i = 1; i < 40 && !found; i++) {
      for (let j = 1; j < 20 && !found; j++) {
        send(svg, "pointermove", box.left + (box.width * i) / 40, box.top + (box.height * j) / 20);
        found = shown();
      }
    }
    if (!found) silent.push(svg.id);
    const at = tip.getBoundingClientRect();
    if (found && (at.left < 0 || at.right > innerWidth || at.top < 0 || at.bottom > innerHeight)) outside.push(svg.id);
    send(svg, "pointerleave", 0, 0);
    if (!tip.hidden) silent.push(`${svg.id} stays`);
    svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    if (!shown()) mute.push(svg.id);
    svg.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  }
  const said = {
    errors, undrawn, silent, outside, mute, crossed, plots: plots.length, width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
    fetched: performance.getEntriesByType("resource").length,
    paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
  };
  document.documentElement.dataset.said = JSON.stringify(said);
});
</script>"""


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(BROWSER),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--virtual-time-budget=3000",
        "--enable-logging=stderr",
        f"--user-data-dir={page.parent / 'profile'}",
        *options,
        page.resolve().as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return done


def examined(folder: Path, tmp_path: Path, *options: str) -> dict:
    text = write_page(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    tried = tmp_path / "tried.html"
    tried.write_text(
        text.replace("<head>", f"<head>{LISTEN}").replace("</body>", f"{CHECK}</body>"),
        encoding="utf-8",
    )
    dom = browse(tried, "--dump-dom", *options).stdout
    said = re.search(r'data-said="([^"]*)"', dom)
    assert said is not None, dom[:500]
    return json.loads(unescape(said[1]))


def faultless(said: dict) -> None:
    assert said["plots"] >= 2
    for fault in ("errors", "undrawn", "silent", "outside", "mute", "crossed"):
        assert said[fault] == [], fault
    assert said["overflow"] <= 0 and said["fetched"] == 0


def brightness(color: str) -> float:
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


def test_every_run_in_the_browser(run_of_shape: Path, tmp_path: Path) -> None:
    faultless(examined(run_of_shape, tmp_path, "--window-size=1280,900"))


def test_comparison_in_the_browser(comparison: Path, tmp_path: Path) -> None:
    faultless(examined(comparison, tmp_path, "--window-size=1280,900"))


@pytest.mark.parametrize("most", [0.0151, 0.00031])
def test_long_numbers_do_not_touch_the_label(most: float, make_run, tmp_path: Path) -> None:
    folder = make_run(f"long-numbers-{most}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if "test" in record:
            record["test"]["mutual_information"] = most
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    faultless(examined(folder, tmp_path, "--window-size=1280,900"))


def test_light_and_dark(make_run, tmp_path: Path) -> None:
    folder = make_run("colors")
    light = examined(folder, tmp_path, "--blink-settings=preferredColorScheme=1")
    dark = examined(folder, tmp_path, "--blink-settings=preferredColorScheme=0")
    faultless(light)
    faultless(dark)
    assert brightness(light["paper"]) > 200 and brightness(light["ink"]) < 60
    assert brightness(dark["ink"]) > 200 and brightness(dark["paper"]) < 60


def framed(page: str, width: int) -> str:
    """A page that shows another one in a frame of this width, and says what that one says."""
    return (
        f"<body><iframe style='width:{width}px;height:640px;border:0'></iframe><script>const f = "
        f"document.querySelector('iframe'); f.addEventListener('load', () => setTimeout(() => {{"
        f"document.documentElement.dataset.said = f.contentDocument.documentElement.dataset.said; }}, 500)); "
        f"f.srcdoc = {json.dumps(page).replace('</', '<' + chr(92) + '/')};</script></body>"
    )


@pytest.mark.parametrize("kind", ["run", "comparison"])
def test_phone(kind: str, make_run, comparison: Path, tmp_path: Path) -> None:
    """In a frame as wide as a phone's screen: Chromium's own window has a least width."""
    folder = (
        comparison if kind == "comparison" else make_run("phone", modes=12, classes=10, clients=100)
    )
    text = write_page(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    inside = text.replace("<head>", f"<head>{LISTEN}").replace("</body>", f"{CHECK}</body>")
    frame = tmp_path / "frame.html"
    frame.write_text(framed(inside, 360), encoding="utf-8")
    said = re.search(r'<html[^>]* data-said="([^"]*)"', browse(frame, "--dump-dom").stdout)
    assert said is not None
    held = json.loads(unescape(said[1]))
    assert held["width"] == 360
    faultless(held)


ACT = """<script>
window.addEventListener("load", async () => {
  const said = {}, table = document.querySelector("#results table"), click = (e) => e.click();
  const column = (at) => [...table.tBodies[0].rows].map((row) => row.cells[at].textContent.trim());
  const heads = [...table.tHead.rows[0].cells];
  said.before = column(0);
  click(heads[1].querySelector("button")); said.falling = column(1);
  click(heads[1].querySelector("button")); said.rising = column(1); said.sorted = heads[1].getAttribute("aria-sort");
  click(heads[0].querySelector("button")); said.names = column(0);

  const chart = document.querySelector("#plot-curve"), entry = document.querySelector("#curves .legend button");
  const visible = () => [...chart.querySelectorAll("[data-series]")].filter((e) => getComputedStyle(e).display !== "none")
    .map((e) => e.dataset.series);
  const tip = () => { chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" })); return document.getElementById("tip").textContent; };
  said.shown = visible(); said.tip = tip();
  click(entry); said.hidden = visible(); said.tipHidden = tip(); said.pressed = entry.getAttribute("aria-pressed");
  click(entry); said.again = visible();

  const make = URL.createObjectURL; let blob;
  URL.createObjectURL = (b) => { blob = b; return make(b); };
  HTMLAnchorElement.prototype.click = function () { said.file = this.download; };
  const tools = table.closest(".scroll").nextElementSibling;
  click([...tools.children].find((b) => b.textContent === "CSV"));
  said.csv = await blob.text();

  const theme = document.getElementById("theme"), paper = () => getComputedStyle(document.body).backgroundColor;
  said.themes = [0, 1, 2, 3].map(() => { const seen = [theme.textContent, paper()]; click(theme); return seen; });

  const rows = (t) => [...t.tBodies[0].rows].filter((row) => getComputedStyle(row).display !== "none").length;
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  const folded = [...document.querySelectorAll("table.folded")][0];
  if (folded) {
    const more = folded.closest(".scroll").nextElementSibling.querySelector("button");
    said.folded = [rows(folded), more.textContent]; click(more); said.unfolded = [rows(folded), more.textContent];
  }
  document.documentElement.dataset.said = JSON.stringify({ ...said, errors });
});
</script>"""


def acted(folder: Path, tmp_path: Path, *options: str) -> dict:
    text = write_page(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    tried = tmp_path / "tried.html"
    tried.write_text(
        text.replace("<head>", f"<head>{LISTEN}").replace("</body>", f"{ACT}</body>"),
        encoding="utf-8",
    )
    dom = browse(tried, "--dump-dom", *options).stdout
    said = re.search(r'<html[^>]* data-said="([^"]*)"', dom)
    assert said is not None, dom[:500]
    return json.loads(unescape(said[1]))


def test_controls_of_a_comparison(comparison: Path, tmp_path: Path) -> None:
    said = acted(comparison, tmp_path, "--blink-settings=preferredColorScheme=1")
    assert said["errors"] == []
    assert said["before"] == ["FedAvg", "<b>Fed-ensemble</b>"]
    assert said["falling"] == ["95.00 ± 1.00", "90.00 ± 1.00"] == said["rising"][::-1]
    assert said["sorted"] == "ascending" and said["names"] == ["FedAvg", "<b>Fed-ensemble</b>"]
    # a band and a line per row; the first row can be hidden, in the tooltip as well
    assert sorted(said["shown"]) == ["0", "0", "1", "1"] == sorted(said["again"])
    assert sorted(said["hidden"]) == ["1", "1"] and said["pressed"] == "false"
    assert "FedAvg: " in said["tip"] and "FedAvg: " not in said["tipHidden"]
    assert "Fed-ensemble</b>: " in said["tipHidden"]
    assert said["file"] == "results-against-the-paper.csv"
    assert said["csv"] == (
        "method,accuracy %,paper\nFedAvg,90.00 ± 1.00,91.5 ± 0.2\n"
        "<b>Fed-ensemble</b>,95.00 ± 1.00,–\n"
    )
    names, papers = zip(*said["themes"], strict=True)
    assert names == ("Theme: auto", "Theme: light", "Theme: dark", "Theme: auto")
    light, again, dark, last = map(brightness, papers)
    assert light == again == last > 200 and dark < 60


def test_long_tables_are_folded(make_run, comparison: Path, tmp_path: Path) -> None:
    rounds = 5 * 40  # forty tests
    root = tmp_path / "runs"
    listed = {
        f"K = {modes}": [str(make_run(f"k{modes}", modes=modes, rounds=rounds, root=root))]
        for modes in (1, 2)
    }
    folder = root / "compare-1"
    folder.mkdir()
    (folder / "runs.json").write_text(json.dumps(listed))
    (folder / "table.csv").write_text("method,accuracy %\nK = 1,90\nK = 2,91\n")
    said = acted(folder, tmp_path)
    assert said["folded"] == [30, "Show all 40 rows"] and said["unfolded"] == [40, "Show 30 rows"]


LINES = """<script>
window.addEventListener("load", () => {
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  const tall = [];
  document.querySelectorAll("tbody :is(th div, td:not(.long))").forEach((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    const lines = new Set([...range.getClientRects()].map((r) => Math.round(r.top))).size;
    if (lines > (cell.tagName === "TD" ? 1 : 3)) tall.push(`${lines} lines: ${cell.textContent}`);
  });
  document.documentElement.dataset.said = JSON.stringify({ tall, cells: document.querySelectorAll("td").length });
});
</script>"""


def test_no_cell_is_broken_on_a_phone(comparison: Path, tmp_path: Path) -> None:
    table = "method,accuracy %,mean of last 5 tests,worst mode %,NLL,ECE %,time\n"
    row = "87.22 ± 5.54,86.22 ± 5.54,80.12 ± 10.54,0.123 ± 0.045,12.34 ± 10.12,1234.5\n"
    (tmp_path / "table.csv").write_text(f"{table}Fed-ensemble with K = 5 and FedProx,{row}")
    text = write_page(tmp_path, tmp_path / "page.html").read_text(encoding="utf-8")
    inside = text.replace("</body>", f"{LINES}</body>")
    frame = tmp_path / "frame.html"
    frame.write_text(framed(inside, 390), encoding="utf-8")
    said = re.search(r'<html[^>]* data-said="([^"]*)"', browse(frame, "--dump-dom").stdout)
    assert said is not None
    assert json.loads(unescape(said[1])) == {"tall": [], "cells": 6}


def test_print(make_run, tmp_path: Path) -> None:
    page = write_page(make_run("print"), tmp_path / "page.html")
    browse(
        page, f"--print-to-pdf={tmp_path / 'page.pdf'}", "--blink-settings=preferredColorScheme=0"
    )
    content = (tmp_path / "page.pdf").read_bytes()
    assert content.startswith(b"%PDF") and 2 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 12


def test_the_check_sees_a_broken_page(make_run, tmp_path: Path) -> None:
    page = write_page(make_run("broken"), tmp_path / "broken.html")
    text = page.read_text(encoding="utf-8").replace(
        'document.getElementById("tip");', "nothing;", 1
    )
    page.write_text(
        text.replace("<head>", f"<head>{LISTEN}").replace("</body>", f"{CHECK}</body>"),
        encoding="utf-8",
    )
    with pytest.raises(AssertionError, match="CONSOLE"):
        browse(page, "--dump-dom")
