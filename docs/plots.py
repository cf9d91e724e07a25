"""Draws docs/plots/ from the CSV files of the benchmarks: `python docs/plots.py`; `--check` only says what is stale.

Every figure is drawn twice, for light and for dark pages. The files are the same for the same CSV files and the same version of
matplotlib; each carries a digest of what it shows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import NOTHING, Result, Run, made_on, runs

PLOTS = Path(__file__).resolve().parent / "plots"
THEMES = {"light": "#3a3f45", "dark": "#c9ced6"}
"""Colour of text and axes; the background is the page's."""
STYLES: dict[str, tuple[str, str, str, str]] = {
    # name in the files: label, colour that is seen on white and on black, marker, line
    "liger_triton": ("liger, Triton", "#2f81f7", "o", "-"),
    "liger_triton_in_place": ("liger, in place", "#2f81f7", "D", ":"),
    "liger_triton_fp32": ("liger, fp32 sum", "#79b8ff", "p", ":"),
    "liger_triton_small": ("liger, chunks of 448, bf16 sum", "#79b8ff", "d", ":"),
    "liger_cutedsl": ("liger, CuTe DSL", "#12a5b8", "P", "-"),
    "torch": ("torch", "#e8743b", "s", "-"),
    "torch_compile": ("torch.compile", "#c99700", "^", "-"),
    "liger_kernel": ("liger-kernel", "#2ea043", "v", "-"),
    "liger_kernel_fp32": ("liger-kernel, fp32 sum", "#2ea043", "<", ":"),
    "cce": ("CCE", "#d1495b", "X", "-"),
    "cce_exact": ("CCE, exact", "#d1495b", "P", ":"),
    "quack": ("QuACK", "#9a6ee0", "*", "-"),
    "copy": ("floor: device copy", "#8b949e", "", "--"),
    "gemms": ("floor: bare products", "#8b949e", "", "--"),
}
MODEL = "llama-3.1-8b"
"""The head that single-shape figures show."""
ROWS = 8192


@dataclass(frozen=True)
class Line:
    """Points under one name of `STYLES`, or one of its own."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Figure:
    """One picture: what it shows, and how."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    joined: bool = True
    x_scale: str = "linear"
    y_scale: str = "linear"
    x_ticks: tuple[float, ...] = ()
    made_on: str = ""

    @property
    def digest(self) -> str:
        """Of everything that is drawn."""
        return hashlib.sha256(json.dumps(vars(self), default=vars).encode()).hexdigest()[:16]


def figures() -> list[Figure]:
    """Those that the result files on GPUs have data for."""
    drawn: list[Figure] = []
    for run in runs(on_cpu=False):
        makers = FIGURES.get(run.kernel, ())
        drawn += [figure for make in makers if (figure := make(run)) is not None]
    return drawn


def _speed(run: Run, wanted: Callable[[Result], bool]) -> list[Result]:
    return [r for r in run.results if r.metric == "speed" and r.mode == "full" and wanted(r)]


def _lines(results: Iterable[Result], x: Callable[[Result], float], y: Callable[[Result], float]) -> tuple[Line, ...]:
    points: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if result.provider in STYLES:
            points.setdefault(result.provider, []).append((x(result), y(result)))
    return tuple(Line(name, tuple(sorted(points[name]))) for name in STYLES if name in points)


def _name(run: Run, what: str) -> str:
    return f"{run.path.stem}_{what}"


def vocabulary(run: Run) -> Figure | None:
    """Cross entropy: time against the vocabulary."""
    found = _speed(run, lambda r: r.config["usage"] == "mean" and r.config["dtype"] == "bfloat16" and r.config["BT"] == ROWS)
    lines = _lines(found, lambda r: r.x, lambda r: r.y)
    if not lines:
        return None
    return Figure(
        _name(run, "vocabulary"),
        f"Cross entropy, {ROWS} rows, bfloat16, forward + backward",
        "vocabulary (classes)",
        "time (ms)",
        lines,
        x_ticks=tuple(sorted({x for line in lines for x, _ in line.points})),
        made_on=made_on(found),
    )


def labelled(run: Run) -> Figure | None:
    """Fused loss: time against the share of labelled rows."""
    found = _speed(run, lambda r: r.config.get("set") == "ignored rows" and r.config["model"] == MODEL)
    lines = _lines(found, lambda r: 100 * (1 - r.config["ignored"]), lambda r: r.y)
    if not lines:
        return None
    return Figure(
        _name(run, "labelled"),
        f"Fused loss, {MODEL}, {ROWS} rows, forward + backward",
        "labelled rows (%)",
        "time (ms)",
        lines,
        made_on=made_on(found),
    )


def pareto(run: Run) -> Figure | None:
    """Fused loss: memory against time; ours at several chunk sizes."""
    found: dict[str, dict[str, float]] = {}
    for result in sorted(run.results, key=lambda r: r.config.get("set") != "shapes"):  # where a set of each has one, this one's
        where = result.config.get("set"), result.config.get("model"), result.x
        if result.mode == "full" and where in (("shapes", MODEL, ROWS), ("chunk sizes", MODEL, ROWS)):
            first = found.setdefault(result.provider, {})
            first.setdefault(result.metric, result.y)
    points = {name: (m["speed"], m["memory"]) for name, m in found.items() if "speed" in m and "memory" in m}
    chunked = {name: point for name, point in points.items() if re.fullmatch(r"liger_(triton|cutedsl)_chunk\d+", name)}
    lines = [Line(name, (points[name],)) for name in STYLES if name in points]
    if not lines:
        return None
    by_size = sorted(chunked, key=lambda name: int(name.rpartition("chunk")[2]))
    sizes = ", ".join(name.rpartition("chunk")[2] for name in by_size)
    if by_size:
        lines.append(Line(f"liger, chunks of {sizes} rows", tuple(chunked[name] for name in by_size)))
    return Figure(
        _name(run, "pareto"),
        f"Fused loss, {MODEL}, {ROWS} rows: lower left is better",
        "time, forward + backward (ms)",
        "extra peak memory (MiB)",
        tuple(lines),
        joined=False,
        x_scale="log",
        y_scale="log",
        made_on=run.made_on,
    )


def chunks(run: Run) -> Figure | None:
    """Fused loss: error of the weight's gradient against the number of chunks."""
    swept = [r for r in run.results if r.metric == "dW_error"]
    names = {"float32": "summed in float32", "bfloat16": "summed in bfloat16", "by plan": "as the plan chooses"}
    lines = []
    for ending, label in names.items():
        points = sorted((r.x, 1e3 * r.y) for r in swept if r.x > 0 and r.provider.endswith(f"accum {ending}"))
        if points:
            lines.append(Line(label, tuple(points)))
    if not lines:
        return None
    sizes = tuple(sorted({x for line in lines for x, _ in line.points}))
    for name in ("torch", "liger_kernel", "cce", "cce_exact"):
        own = [1e3 * r.y for r in swept if r.x == 0 and r.provider == name]
        lines += [Line(name, ((sizes[0], y), (sizes[-1], y))) for y in own]
    config = swept[0].config
    return Figure(
        _name(run, "chunks"),
        f"Error of the head's gradient, {config['N']} rows, {config['H']} × {config['V']}",
        "chunks (other packages: as they choose)",
        "relative error from float64 (10⁻³)",
        tuple(lines),
        x_scale="log",
        x_ticks=sizes,
        made_on=made_on(swept),
    )


FIGURES: dict[str, tuple[Callable[[Run], Figure | None], ...]] = {
    "cross_entropy": (vocabulary,),
    "fused_linear_cross_entropy": (labelled, pareto, chunks),
}
OWN_STYLES = (("#2f81f7", "o", "-"), ("#79b8ff", "D", "-."), ("#9a6ee0", "P", ":"))
"""Of lines that `STYLES` does not know."""


def draw(figure: Figure, theme: str, path: Path) -> None:
    """One file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    ink = THEMES[theme]
    settings: dict[str, Any] = {
        "svg.hashsalt": figure.name,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9.5,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": ink,
        "grid.alpha": 0.18,
        "axes.axisbelow": True,
    }
    with matplotlib.rc_context(settings):
        canvas, axes = pyplot.subplots(figsize=(5.4, 4.1), layout="constrained")
        own = iter(OWN_STYLES)
        for line in figure.lines:
            _draw_line(axes, line, figure.joined, own)
        axes.set_xscale(figure.x_scale)
        axes.set_yscale(figure.y_scale)
        if figure.x_ticks:
            axes.set_xticks(figure.x_ticks, [f"{tick:.0f}" for tick in figure.x_ticks])
            axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        for scale, axis in ((figure.x_scale if not figure.x_ticks else "", axes.xaxis), (figure.y_scale, axes.yaxis)):
            if scale == "log":
                _plain_ticks(axis)
        if figure.y_scale == "linear":
            axes.set_ylim(bottom=0)
        if figure.x_scale == "linear":
            axes.set_xlim(left=0)
        axes.set_xlabel(figure.x_label)
        axes.set_ylabel(figure.y_label)
        axes.set_title(figure.title, fontsize=9.5)
        canvas.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
        metadata = {"Date": None, "Creator": f"matplotlib {matplotlib.__version__}", "Description": _described(figure)}
        canvas.savefig(path, transparent=True, metadata=metadata)
        pyplot.close(canvas)


def _draw_line(axes: Any, line: Line, joined: bool, own: Any) -> None:
    label, (colour, marker, style) = (
        (STYLES[line.name][0], STYLES[line.name][1:]) if line.name in STYLES else (line.name, next(own))
    )
    x, y = zip(*line.points, strict=True)
    points = joined and line.name in STYLES and len({value for _, value in line.points}) == 1  # a level, not a measurement
    axes.plot(
        x,
        y,
        label=label,
        color=colour,
        marker="" if points else marker,
        linestyle=style if joined or len(x) > 1 else "",
        linewidth=1.8 if colour == STYLES["liger_triton"][1] else 1.3,
        markersize=6,
    )


def _plain_ticks(axis: Any) -> None:
    """Numbers such as 20, 50, 100 instead of powers of ten."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _described(figure: Figure) -> str:
    return f"{figure.title}. {figure.made_on}. Data {figure.digest}."


def path_of(figure: Figure, theme: str, folder: Path = PLOTS) -> Path:
    """The file of a figure."""
    return folder / f"{figure.name}_{theme}.svg"


def markdown(figure: Figure) -> str:
    """Both files, of which a page shows the one for its colours: in the repository's viewer as on the site."""
    alt = f"{figure.title}; {figure.y_label} against {figure.x_label}"
    return "\n".join(f"![{alt}](plots/{path_of(figure, theme).name}#gh-{theme}-mode-only)" for theme in THEMES)


def shown(what: str) -> str:
    """The figures of one kind, for a page."""
    return "".join(f"{markdown(figure)}\n" for figure in figures() if figure.name.endswith(f"_{what}")) or NOTHING


def stale(drawn: Sequence[Figure]) -> list[Path]:
    """Files that are not there, or show other numbers, or show what is not measured any more."""
    wanted = {path_of(figure, theme): figure.digest for figure in drawn for theme in THEMES}
    old = [path for path in PLOTS.glob("*.svg") if path not in wanted]
    for path, digest in wanted.items():
        if not path.is_file() or f"Data {digest}." not in path.read_text("utf-8"):
            old.append(path)
    return old


def main() -> int:
    """Draw, or with `--check` name the stale files and return 1."""
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a figure is stale")
    drawn = figures()
    if parser.parse_args().check:
        old = stale(drawn)
        for path in old:
            print(f"{path.name} is stale: run python docs/plots.py", file=sys.stderr)
        return int(bool(old))
    PLOTS.mkdir(exist_ok=True)
    for path in stale(drawn):
        path.unlink(missing_ok=True)
    for figure in drawn:
        for theme in THEMES:
            draw(figure, theme, path_of(figure, theme))
    print(f"drew {len(drawn)} figures into {PLOTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
