"""The documentation says what the code does: generated parts are fresh, examples run, links and names resolve."""

import ast
import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import liger

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("README.md")])
FENCED = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FETCHED = re.compile(r"<(?:script|img|iframe|link)[^>]* (?:src|href)=\"?(https?:[^\"\s>]+)")
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
GENERATED = re.compile(r"<!-- generated: \w+ -->\n.*?<!-- /generated -->", re.DOTALL)
MEASURED = re.compile(r"\d[\d.,]* ?(?:ms|us|µs|s|MiB|GiB|TFLOP|TB/s|×|times|%)(?!\w)")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def python_blocks(page: Path) -> list[tuple[str, str]]:
    """(title, code) of the Python examples of a page."""
    return [(title, code) for language, title, code in FENCED.findall(page.read_text("utf-8")) if language == "python"]


def anchors(page: Path) -> set[str]:
    """The anchors that a page defines: its headings' and those of the reference's directives."""
    text = FENCED.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
    return slugs | set(DIRECTIVE.findall(text))


def test_generated_parts_are_fresh():
    check = run(sys.executable, "docs/generate.py", "--check")
    assert check.returncode == 0, check.stderr


def test_stale_parts_are_noticed_in_the_readme_too(tmp_path):
    """In a copy of the tree, with one number changed."""
    for name in ("docs", "benchmark", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    readme = (ROOT / "README.md").read_text("utf-8")
    part = GENERATED.search(readme)[0]
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").write_text(readme.replace(part, re.sub(r"\d", "0", part)), "utf-8")
    (tmp_path / "docs").unlink()
    shutil.copytree(DOCS, tmp_path / "docs")
    check = run(sys.executable, str(tmp_path / "docs" / "generate.py"), "--check")
    assert (check.returncode, check.stderr) == (1, "README.md is stale: run python docs/generate.py\n")


ARITHMETIC = {
    "differences.md": {"0.4 %"},
    "index.md": {"2 GiB"},
    "measured_facts.md": {"65 %", "2.5 GiB", "128 ×", "7 %", "8192 ×", "60 us"},
    "numerics.md": {"20 %", "0.05 %"},
}
"""What is computed, chosen, estimated or wished for, and not measured."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_measured_numbers_are_generated(page):
    """A time, a size or a ratio comes from a CSV file, through docs/generate.py."""
    text = GENERATED.sub("", FENCED.sub("", page.read_text("utf-8")))
    assert set(MEASURED.findall(text)) == ARITHMETIC.get(page.name, set())


def test_results_say_what_they_were_made_on(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    results = importlib.import_module("results")
    for run in results.runs():
        for row in results.read(run.path):
            assert all(row[column] for column in ("gpu_name", "device", "torch", "liger_version")), run.path.name
            assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", row["timestamp"]), run.path.name
            assert row["driver"] or row["device"] != "cuda", run.path.name
    for part in (results.step_summary(), results.ce_summary(), results.flce_summary()):
        assert re.search(r"^\*.*NVIDIA H200, driver .* torch .* \d{4}-\d\d-\d\d\.\*$", part, re.MULTILINE)


@pytest.fixture
def plots(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("plots")


def test_figures_are_fresh(plots):
    drawn = plots.figures()
    assert {figure.name.rpartition("_")[2] for figure in drawn} >= {"vocabulary", "labelled", "pareto", "chunks"}
    assert plots.stale(drawn) == []
    for figure in drawn:
        assert figure.x_label.endswith(")")
        assert figure.y_label.endswith(")"), "an axis has a unit"
    changed = dataclasses.replace(drawn[0], lines=drawn[0].lines[1:])
    assert len(plots.stale([changed, *drawn[1:]])) == 2, "another line, another digest, in both themes"


def test_figures_show_the_csv_files(plots):
    results = importlib.import_module("results")
    for figure in plots.figures():
        run = next(run for run in results.runs() if figure.name.startswith(run.path.stem))
        values = {result.y for result in run.results}
        scale = 1e3 if figure.name.endswith("chunks") else 1
        for line in figure.lines:
            for _, y in line.points:
                assert any(abs(y - scale * value) <= 1e-9 * y for value in values), (figure.name, line.name)


def test_figures_are_drawn_alike(plots, tmp_path):
    """The same bytes for the same numbers, where the version of matplotlib is the same."""
    figure = plots.figures()[0]
    twice = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for path in twice:
        plots.draw(figure, "dark", path)
    first, second = (path.read_bytes() for path in twice)
    assert first == second
    there = plots.path_of(figure, "dark").read_bytes()
    creator = re.search(rb"matplotlib [\d.]+", there)[0]
    assert creator not in first or first == there


def test_every_figure_is_shown(plots):
    page = (DOCS / "performance.md").read_text("utf-8")
    for figure in plots.figures():
        for theme in plots.THEMES:
            assert f"(plots/{plots.path_of(figure, theme).name}#gh-{theme}-mode-only)" in page


def messages() -> set[str]:
    """Every text in the code, with … for what is formatted into it."""
    found = set()
    for path in (ROOT / "liger").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.add("".join(parts))
    return found


def test_quoted_messages_are_in_the_code():
    quoted = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    assert len(quoted) > 20
    known = messages()
    for beginning in quoted:
        assert any(message.startswith(beginning) for message in known), beginning


def test_no_result_is_left_out(monkeypatch):
    """Every time in the result files has a cell of its own."""
    monkeypatch.syspath_prepend(DOCS)
    results = importlib.import_module("results")
    assert results.runs("cross_entropy")
    for found in results.runs():
        tables = found.tables()
        cells = [table.cell(row, provider) for table in tables for row in table.cells for provider in table.providers]
        timed = [r for r in found.results if r.metric == "speed" and r.provider not in results.FLOORS]
        assert len(list(filter(None, cells))) == len(timed), found.path.name


def test_every_public_name_is_in_the_reference():
    documented = set(DIRECTIVE.findall((DOCS / "reference.md").read_text("utf-8")))
    assert {f"liger.{name}" for name in liger.__all__} <= documented


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_tells_to_call_is_in_the_reference(page):
    """What it imports from the package or writes with its whole path; a module is told of where its names are."""
    documented = set(DIRECTIVE.findall((DOCS / "reference.md").read_text("utf-8")))
    told = set(re.findall(r"`(liger(?:\.\w+)+)", FENCED.sub("", page.read_text("utf-8"))))
    for _, code in python_blocks(page):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "liger":
                told |= {f"{node.module}.{alias.name}" for alias in node.names}
    paths = (path.with_suffix("").relative_to(ROOT) for path in (ROOT / "liger").rglob("*.py"))
    modules = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    assert told - modules <= documented


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for link in LINK.findall(FENCED.sub("", page.read_text("utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        themed = target.suffix == ".svg" and anchor in ("gh-light-mode-only", "gh-dark-mode-only")
        assert not anchor or themed or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own tracing
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    """A page's Python blocks, in order, in one namespace; a block with a title is a file that they may import."""
    # Loads Triton's kernels, which read the environment only when they are defined, for the tests after these.
    liger.explain("cross_entropy", device=liger.DeviceInfo("cuda", (9, 0)), dtype=torch.float32, shape=(8, 16))
    for variable in ("LIGER_BACKEND", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {"__name__": page.stem}
    for title, code in python_blocks(page):
        if title:
            (tmp_path / title).write_text(code, "utf-8")
        else:
            exec(compile(code, page.name, "exec"), namespace)


def test_site_builds_and_fetches_nothing(tmp_path):
    pytest.importorskip("material", reason="the docs extra is not installed")
    build = run(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"))
    assert build.returncode == 0, build.stderr
    pages = list((tmp_path / "site").glob("*.html"))
    assert len(pages) >= len(list(DOCS.glob("*.md")))
    for page in pages:
        html = page.read_text("utf-8")
        assert "arithmatex" not in html, f"{page.name}: a formula was not converted"
        fetched = FETCHED.findall(html)
        assert not fetched, f"{page.name}: {fetched}"
