"""Fused linear cross entropy on a CPU against `F.linear` followed by `F.cross_entropy`: forward and backward.

    python -m benchmark.benchmark_cpu

Time: all variants in one process, in turn, medians over the rounds; every step starts from leaves without gradients.

Memory: each variant once, in a process of its own: the highest resident size that the kernel saw during the step
(VmHWM, reset just before) minus the resident size before it (VmRSS). That counts all that the step really made the
process hold: logits, gradients (on both sides), temporaries that live inside an operator, the workspace of the matrix
products, and heap that was freed but not given back. Nothing that a framework reports about itself is taken on trust.
A step on a few rows comes first, so that thread pools and code pages are not counted.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import liger

from .common import DATA, Measurement, Quantiles, describe, interleaved_ms, print_table, write_csv

CPU = torch.device("cpu")
MIB = 1 << 20
WARM_UP_ROWS = 8


@dataclass(frozen=True)
class Variant:
    """What is timed."""

    provider: str
    """liger, or torch for F.linear and F.cross_entropy."""
    ignored: int
    """Rows out of a hundred whose target is ignored."""
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.provider} {self.dtype}, {self.ignored} % ignored"


@dataclass(frozen=True)
class Size:
    """N rows, V vocabulary, H hidden."""

    n: int
    hidden: int
    vocab: int


TORCH, LIGER = Variant("torch", 0), Variant("liger", 0)
TORCH_80, LIGER_80 = Variant("torch", 80), Variant("liger", 80)
LIGER_BF16 = Variant("liger", 0, "bfloat16")
TIMED = (TORCH, LIGER, TORCH_80, LIGER_80, LIGER_BF16)
WEIGHED = (TORCH, LIGER, TORCH_80, LIGER_80)
RATIOS = (
    ("time", LIGER, TORCH),
    ("time", LIGER_80, TORCH_80),
    ("time", LIGER_BF16, LIGER),
    ("memory", LIGER, TORCH),
    ("memory", LIGER_80, TORCH_80),
)


def torch_loss(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """The loss over the full logits."""
    return F.cross_entropy(F.linear(hidden, head), target)


def liger_loss(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """The fused loss."""
    return liger.liger_fused_linear_cross_entropy(hidden, head, target)


LOSSES = {"torch": torch_loss, "liger": liger_loss}


def make_leaves(size: Size, variant: Variant) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, head, target); the ignored rows are spread over the batch."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, variant.dtype)
    hidden = torch.randn(size.n, size.hidden, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(size.vocab, size.hidden, generator=generator).mul_(size.hidden**-0.5).to(dtype).requires_grad_()
    target = torch.randint(size.vocab, (size.n,), generator=generator)
    ignored = torch.randperm(size.n, generator=generator)[: size.n * variant.ignored // 100]
    return hidden, head, target.index_fill_(0, ignored, -100)


def prepare(variant: Variant, leaves: tuple[Tensor, Tensor, Tensor]) -> Callable[[], None]:
    """One forward and backward on leaves whose gradients are gone."""
    for leaf in leaves:
        leaf.grad = None
    return lambda: LOSSES[variant.provider](*leaves).backward()


def measure_times(size: Size, rounds: int) -> dict[Variant, Quantiles]:
    """ms per forward and backward."""
    steps = {str(variant): functools.partial(prepare, variant, make_leaves(size, variant)) for variant in TIMED}
    times_ms = interleaved_ms(steps, rounds)
    return {variant: times_ms[str(variant)] for variant in TIMED}


def measure_memory(size: Size, repeats: int) -> dict[Variant, Quantiles]:
    """Peak extra MiB of one forward and backward."""
    return {variant: Quantiles.of([_in_a_process(size, variant) for _ in range(repeats)]) for variant in WEIGHED}


def _in_a_process(size: Size, variant: Variant) -> float:
    arguments = ["--child", variant.provider, str(variant.ignored), "--shape", f"{size.n}x{size.hidden}x{size.vocab}"]
    told = subprocess.run(
        [sys.executable, "-m", "benchmark.benchmark_cpu", *arguments],
        cwd=Path(__file__).resolve().parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(told.stdout)


def peak_extra_bytes(size: Size, variant: Variant) -> int:
    """Of this process, which must not have run anything large before."""
    small = Size(WARM_UP_ROWS, size.hidden, size.vocab)
    prepare(variant, make_leaves(small, variant))()
    step = prepare(variant, make_leaves(size, variant))
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status_bytes("VmRSS")
    step()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}: memory is measured on Linux only")
    return int(found[1]) * 1024


def measurements(
    size: Size, times: dict[Variant, Quantiles], memory: dict[Variant, Quantiles], load: float
) -> list[Measurement]:
    """The rows of the CSV file."""
    config = {"N": size.n, "H": size.hidden, "V": size.vocab}
    config |= {"threads": torch.get_num_threads(), "load": round(load, 2)}
    return [
        Measurement(
            "fused_linear_cross_entropy",
            variant.provider,
            "full",
            metric,
            unit,
            "ignored",
            "ignored rows (%)",
            variant.ignored,
            y,
            config | {"dtype": variant.dtype},
        )
        for metric, unit, found in (("speed", "ms", times), ("memory", "MiB", memory))
        for variant, y in found.items()
    ]


def report(times: dict[Variant, Quantiles], memory: dict[Variant, Quantiles]) -> None:
    """Print both tables: what was measured, and the ratios that matter."""
    rows = [(str(v), str(times[v]), str(memory[v]) if v in memory else "") for v in times]
    print_table(("forward + backward", "time, ms", "peak extra memory, MiB"), rows)
    print()
    found = {"time": times, "memory": memory}
    ratios = [(name, f"{a} / {b}", f"{found[name][a].p50 / found[name][b].p50:.3f}") for name, a, b in RATIOS]
    print_table(("ratio of", "what", "medians"), ratios)


def _size(text: str) -> Size:
    if not re.fullmatch(r"\d+x\d+x\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not NxHxV, such as 4096x512x32768")
    return Size(*map(int, text.split("x")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmark.benchmark_cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=_size, default="4096x512x32768", help="NxHxV (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="processes per memory figure (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=DATA / "cpu.csv", help="default: %(default)s")
    parser.add_argument("--child", nargs=2, metavar=("PROVIDER", "IGNORED"), help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure, print and write; as a child, print one number."""
    arguments = _parser().parse_args()
    size = arguments.shape
    if arguments.child:
        provider, ignored = arguments.child
        print(peak_extra_bytes(size, Variant(provider, int(ignored))) / MIB)
        return
    load = os.getloadavg()[0]
    print(f"{describe(CPU)}\nN={size.n}, H={size.hidden}, V={size.vocab}; load before: {load:.2f}\n")
    memory = measure_memory(size, arguments.repeats)
    times = measure_times(size, arguments.rounds)
    report(times, memory)
    write_csv(arguments.output, measurements(size, times, memory, load), CPU)
    print(f"\nwrote {arguments.output}")


if __name__ == "__main__":
    main()
