"""What a check writes for the docs: a CSV file whose lines say what they were made on."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import torch

from liger.dispatch.capability import installed_version

PACKAGES = ("triton", "nvidia-cutlass-dsl")
STAMP = ("gpu", "torch", *PACKAGES, "date")


def write(path: Path, columns: Sequence[str], lines: Iterable[Sequence[object]], device: torch.device) -> None:
    """Lines of these columns, and behind them the device, the versions and the date.

    Raises:
        ValueError: a column has a name that one of those has.
    """
    if twice := set(columns) & set(STAMP):
        raise ValueError(f"columns {sorted(twice)} would be there twice")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    stamp = (gpu, torch.__version__, *(installed_version(name) or "" for name in PACKAGES), date.today().isoformat())
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*columns, *STAMP))
        writer.writerows((*line, *stamp) for line in lines)
