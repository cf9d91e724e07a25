"""The Trainer of transformers with and without `liger.integrations.transformers.patch`: time, memory and losses.

    python -m benchmark.benchmark_hf_trainer [--model qwen3-0.6b] [--steps 8]

A model with published dimensions and random weights, as in `benchmark_training_step`, is trained whole by `Trainer`: AdamW,
gradient accumulation over two batches of 4 sequences of 2048 tokens, each sequence with a prompt of another length (labels
-100). Both runs see the same batches from the same weights. A step is everything that the Trainer does for it; the first two
are left out of the times. Memory is the peak of allocated bytes over the whole run, weights and optimizer included.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from liger.dispatch.capability import installed_version
from liger.integrations.transformers import patch, report

from .benchmark_training_step import SETUPS, Setup
from .common import DATA, Measurement, Quantiles, Report, default_device, describe, print_markdown

SEQUENCES, LENGTH, ACCUMULATE = 4, 2048, 2
WARM_UP = 2
"""Steps that are not timed: kernels are compiled and the allocator grows."""


class Prompts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens; of each sequence another share is a prompt."""

    def __init__(self, count: int, vocab: int, length: int) -> None:
        self.count, self.vocab, self.length = count, vocab, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(self.vocab, (self.length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(1, self.length, (), generator=generator))] = -100
        return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True)
class Run:
    """What one run of the Trainer took and gave."""

    losses: list[float]
    step_ms: Quantiles
    peak_mib: float | None
    fused: int
    """Losses computed without logits."""


def train(setup: Setup, device: torch.device, *, fused: bool, steps: int, sequences: int, length: int) -> Run:
    """One run from freshly made weights."""
    transformers = importlib.import_module("transformers")
    model = setup.build(device)
    cuda = device.type == "cuda"
    marks: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize(device)
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder, patch(model) if fused else contextlib.nullcontext():
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=sequences, learning_rate=1e-5,
            gradient_accumulation_steps=ACCUMULATE, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
            use_cpu=not cuda, dataloader_pin_memory=cuda, seed=0,
        )  # fmt: skip
        data = Prompts(steps * ACCUMULATE * sequences, setup.head.vocab, length)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Clock])
        trainer.remove_callback(transformers.PrinterCallback)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        trainer.train()
        count = report(model).fused
    peak = torch.cuda.max_memory_allocated(device) / (1 << 20) if cuda else None
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    times = [1e3 * (end - start) for start, end in zip(marks[WARM_UP - 1 :], marks[WARM_UP:], strict=False)]
    del trainer, model
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return Run(losses, Quantiles.of(times), peak, count)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    prog, summary = "python -m benchmark.benchmark_hf_trainer", (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=prog, description=summary)
    parser.add_argument("--model", choices=SETUPS, default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=8, help=f"at least {WARM_UP + 2}; the first {WARM_UP} are not timed")
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--out", type=Path, default=DATA / "hf_trainer.csv", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    if arguments.steps < WARM_UP + 2:
        parser.error(f"argument --steps: must be at least {WARM_UP + 2}, got {arguments.steps}")
    setup, size = SETUPS[arguments.model], {"sequences": arguments.sequences, "length": arguments.length}
    written = Report(arguments.out, arguments.device, 600.0)
    print(describe(arguments.device), flush=True)
    runs = {
        name: train(setup, arguments.device, fused=name == "liger", steps=arguments.steps, **size)
        for name in ("transformers", "liger")
    }
    for name, run in runs.items():
        config = {
            "model": setup.name, **size, "accumulate": ACCUMULATE, "steps": arguments.steps, "dtype": "bfloat16",
            "fused": run.fused, **{package: installed_version(package) for package in ("transformers", "accelerate")},
        }  # fmt: skip
        metrics = [("speed", "ms", run.step_ms), ("loss", "nat", Quantiles(*[run.losses[-1]] * 3))]
        if run.peak_mib is not None:
            metrics.append(("memory", "MiB", Quantiles(*[run.peak_mib] * 3)))
        for metric, unit, y in metrics:
            written.measurements.append(
                Measurement("hf_trainer", name, "full", metric, unit, "step", "optimizer steps", arguments.steps, y, config)
            )
    written.finish()
    plain, ours = runs["transformers"], runs["liger"]
    off = max(abs(a - b) / abs(a) for a, b in zip(plain.losses, ours.losses, strict=True))
    print_markdown(
        ("", *runs),
        [
            ("ms per optimizer step", *(f"{run.step_ms.p50:.1f}" for run in runs.values())),
            ("peak MiB", *("" if run.peak_mib is None else f"{run.peak_mib:.0f}" for run in runs.values())),
            ("first and last loss", *(f"{run.losses[0]:.5f}, {run.losses[-1]:.5f}" for run in runs.values())),
            ("fused losses", *(str(run.fused) for run in runs.values())),
        ],
    )
    print(f"\nlosses differ by at most {off:.1e}; {describe(arguments.device)}; wrote {arguments.out}")


if __name__ == "__main__":
    main()
