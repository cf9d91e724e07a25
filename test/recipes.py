"""Which recipes ran where: `pytest --record-recipes=FILE` writes one line per recipe, test, backend and place.

A recipe is an input on which loss kernels have gone wrong; its id (N1, A3, ...) begins the names of its tests. docs/generate.py
makes the table of docs/recipes.md from such files.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

import torch

from liger.dispatch.capability import installed_version

COLUMNS = ("recipe", "test", "backend", "where", "passed", "failed", "skipped", "torch", "triton", "date")
NAME = re.compile(r"(?P<test>[\w/.]+::test_(?P<ids>(?:[A-Z]\d+_)+)\w*)(?:\[(?:(?:ce|flce)-(?P<backend>\w+)-(?:cpu|cuda))?)?")


class Recorder:
    """A pytest plugin; under xdist it lives in the controller, which sees every report."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[tuple[str, str, str, str], Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report) -> None:
        named = NAME.match(report.nodeid)
        if named is None or (report.when != "call" and report.passed):
            return
        backend = named["backend"] or ""
        on_gpu = "gpu" in report.keywords
        if on_gpu:
            where = torch.cuda.get_device_name() if torch.cuda.is_available() else "GPU"
        else:
            where = "interpreter" if backend == "triton" else "CPU"
        for recipe in named["ids"].strip("_").split("_"):
            self.found[recipe, named["test"], backend, where][report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        on = (torch.__version__, installed_version("triton") or "", date.today().isoformat())
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            for key, outcomes in sorted(self.found.items()):
                writer.writerow((*key, *(outcomes[name] for name in ("passed", "failed", "skipped")), *on))


def pytest_addoption(parser) -> None:
    parser.addoption("--record-recipes", type=Path, metavar="FILE", help="write which recipes ran where")


def pytest_configure(config) -> None:
    path = config.getoption("--record-recipes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path), "recipes")
