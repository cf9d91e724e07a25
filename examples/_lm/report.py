"""What a run leaves behind: a table of facts and the loss curve as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from liger.dispatch import Explanation

TABLE_WIDTH = 110


@dataclass
class History:
    """Losses of a run, nats per labelled token, each with the number of optimizer steps taken before it."""

    training: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)

    def last_training_loss(self, steps: int) -> float:
        """Mean over the last few steps: one batch alone is noisy."""
        losses = [loss for _, loss in self.training[-steps:]]
        return sum(losses) / len(losses)


def backend_rows(explanation: Explanation) -> list[tuple[str, str]]:
    """Which backend runs the loss, who decided, and what is against each one preferred to it."""
    reasons = [f"{name}: {'; '.join(why)}" for name, why in explanation.rows if why]
    decided = {
        "argument": "named by --backend",
        "environment": "named by $LIGER_BACKEND",
        "auto": "the first in order of preference that can run this",
    }
    rows = [("backend", f"{explanation.chosen} ({decided[explanation.source]})")]
    rows += [("not available", reason) for reason in reasons]
    return [*rows, ("plan", str(explanation.plan))]


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Lay out (label, value) rows in two columns, long values wrapped."""
    width = max(len(label) for label, _ in rows)
    lines = []
    for label, value in rows:
        indent = " " * (width + 2)
        lines.append(textwrap.fill(value, TABLE_WIDTH, initial_indent=f"{label:<{width}}  ", subsequent_indent=indent))
    rule = "-" * TABLE_WIDTH
    return "\n".join([rule, *lines, rule])


def draw_loss_curve(history: History, unigram_entropy: float, title: str, path: Path) -> None:
    """Save the loss curve as PNG, with the unigram entropy as the line to get below."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*history.training, strict=True), linewidth=1, color="tab:blue", alpha=0.6, label="training batch")
    axes.plot(*zip(*history.held_out, strict=True), "o-", color="black", markersize=4, label="held-out text")
    axes.axhline(unigram_entropy, linestyle="--", color="tab:red", label=f"unigram entropy {unigram_entropy:.2f}")
    axes.set(title=title, xlabel="optimizer steps", ylabel="loss, nats per labelled token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
