"""Every benchmark that fits the machine it is run on: `python -m benchmark`, or `make bench`.

On a GPU: cross entropy, fused linear cross entropy, and training steps, with the shapes of `liger.testing.CASES`. On a CPU
the same two losses with few rows. Each writes a CSV file of its own for this device; one that is there is added to, so that
an interrupted run is taken up by the same command.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from liger.__main__ import device_name

from .common import DATA, default_device, describe, print_table
from .providers import peers

FEW_ROWS = "64"
"""On a CPU, where a step of 8192 would take minutes."""


@dataclass(frozen=True)
class Suite:
    """A benchmark, and what it is asked for on a GPU and on a CPU; None where it is not run."""

    name: str
    on_gpu: tuple[str, ...]
    on_cpu: tuple[str, ...] | None

    def run(self, device: torch.device, out: Path, more: Sequence[str]) -> None:
        """In this process."""
        module = importlib.import_module(f"benchmark.benchmark_{self.name}")
        asked = self.on_cpu if device.type == "cpu" else self.on_gpu
        module.main([*(asked or ()), "--device", str(device), "--out", str(out), *more])


FLOAT32 = ("--dtype", "float32")
SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "cross_entropy",
            ("--errors",),
            (
                *("--bt", FEW_ROWS, *FLOAT32, "--vocab", "32000", "128256", "--reduction", "mean", "none_weighted"),
                *("--mode", "full", "no-grad-forward", "--providers", "liger_torch", "torch", "torch_compile"),
            ),
        ),
        Suite(
            "fused_linear_cross_entropy",
            ("--show",),
            (
                *("--bt", FEW_ROWS, *FLOAT32, "--shapes", "llama-2-7b", "--ignore-fraction", "0", "0.75"),
                *("--backend", "torch", "--providers", "liger_torch", "torch", "torch_compile", "torch_chunked"),
            ),
        ),
        Suite("training_step", (), None),
    )
}


def slug(name: str) -> str:
    """A device's name in a file's: "NVIDIA H200" is h200."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia ")).strip("_")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m benchmark", description=(__doc__ or "").splitlines()[0])
    top.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES), help="default: all")
    top.add_argument("--device", type=torch.device, default=default_device(), help="default: %(default)s")
    top.add_argument("--data", type=Path, default=DATA, help="where the CSV files are (default: %(default)s)")
    top.add_argument("--fresh", action="store_true", help="measure again what the files already have")
    top.add_argument("--budget-s", type=float, help="of each suite; what is then left is left out")
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Say what is there, then run the suites in turn."""
    arguments = parser().parse_args(argv)
    device = arguments.device
    print(f"{describe(device)}\n")
    print_table(("compared with", "version"), ((name, version or "missing") for name, version in peers().items()))
    more = ["--fresh"] if arguments.fresh else []
    more += [] if arguments.budget_s is None else ["--budget-s", str(arguments.budget_s)]
    for name in arguments.suites:
        suite = SUITES[name]
        print(f"\n{name.replace('_', ' ')}\n")
        if device.type == "cpu" and suite.on_cpu is None:
            print("left out: it needs a GPU")
        else:
            suite.run(device, arguments.data / f"{name}_{slug(device_name(device))}.csv", more)


if __name__ == "__main__":
    main()
