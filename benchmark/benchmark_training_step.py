"""A training step of Hugging Face models: what the loss layer is worth where it is used.

    python -m benchmark.benchmark_training_step [--models qwen3-0.6b ...] [--shares 16.5 ...]

Models are made from their config classes with the published dimensions and random weights: bfloat16, SDPA attention,
gradient checkpointing, the small ones trained whole, the 8B ones through LoRA adapters of rank 16 on every linear layer but
the head. A step is forward and backward of 8192 tokens, 4 sequences of 2048; the optimizer's part, which no loss changes, is
left out. Of each sequence the first part is a prompt: its labels are -100. A share is that of the rest.

The model's own loss, and this package's through `liger.integrations.transformers.patch`, are the model's own call with labels;
liger-kernel's fused loss gets the hidden states and the head's weight. They take turns in one process: a first round compares
their values and takes the peak of allocated memory, weights and gradients included, and the norm of all gradients; then come
the timed rounds, whose medians are reported. A time is that of the wall clock; beside it stands when the host had launched
the step: where that is as long, a small model or a fast GPU, the host and not the GPU decides, and `--compile` shows the step
with fewer launches. A share that is done is on disk: run again, the command goes on after it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger.dispatch.capability import installed_version
from liger.integrations.transformers import patch
from liger.integrations.transformers import report as report_of
from liger.testing import CASES, Case

from .benchmark_fused_linear_cross_entropy import never_skipping
from .common import (
    DATA,
    Measurement,
    Quantiles,
    Report,
    default_device,
    describe,
    interleaved_ms,
    print_markdown,
)
from .providers import LinearCrossEntropy, linear_cross_entropy_providers, provider_version

HEADS = {case.name: case for case in CASES}
QWEN3 = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
LLAMA_3_1 = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@dataclass(frozen=True)
class Setup:
    """A published model, and which part of it is trained. The dimensions are those of its config.json."""

    head: Case
    config_class: str
    """In `transformers`."""
    shared: Mapping[str, Any]
    """Of the family."""
    intermediate: int
    layers: int
    heads: int
    """Of the queries."""
    tied: bool
    lora: bool

    @property
    def name(self) -> str:
        """As in `liger.testing.CASES`."""
        return self.head.name

    def config(self) -> Any:
        """The model's configuration."""
        return getattr(importlib.import_module("transformers"), self.config_class)(
            vocab_size=self.head.vocab,
            hidden_size=self.head.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            tie_word_embeddings=self.tied,
            use_cache=False,
            **self.shared,
        )

    def build(self, device: torch.device, *, compiled: bool = False) -> Any:
        """The model with random weights, made on the device; `compiled`, layer by layer, so that it compiles once for all."""
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(
                self.config(), dtype=torch.bfloat16, attn_implementation="sdpa"
            )
            if self.lora:
                peft = importlib.import_module("peft")
                adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
                model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if compiled:
            torch.compiler.reset()
            for layer in causal_model(model).base_model.layers:
                layer.compile()
        return model.to(device).train()


SETUPS = {
    setup.name: setup
    for setup in (
        Setup(HEADS["qwen3-0.6b"], "Qwen3Config", QWEN3, 3072, 28, 16, tied=True, lora=False),
        Setup(HEADS["qwen3-1.7b"], "Qwen3Config", QWEN3, 6144, 28, 16, tied=True, lora=False),
        Setup(HEADS["qwen3-4b"], "Qwen3Config", QWEN3, 9728, 36, 32, tied=True, lora=False),
        Setup(HEADS["qwen3-8b"], "Qwen3Config", QWEN3, 12288, 36, 32, tied=False, lora=True),
        Setup(HEADS["llama-3.1-8b"], "LlamaConfig", LLAMA_3_1, 14336, 32, 32, tied=False, lora=True),
    )
}
SHARES = (16.5, 100.0, 5.5, 65.0, 92.0, 77.0, 9.1)
"""Labelled tokens in a hundred; those that say most come first, should the time run out."""
SEQUENCES, LENGTH = 4, 2048
ROUNDS = 5
NOISE = 2.0**-9
"""Losses may differ by one rounding of theirs to bfloat16, in which all of them round their logits."""

Loss = Callable[[Any, Tensor, Tensor], Tensor]
"""(model, ids (B, T), labels (B, T), not shifted) -> mean loss"""


def causal_model(model: Any) -> Any:
    """The Transformers model, without what PEFT puts around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def own_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """As `transformers` computes it: all logits, widened to float32."""
    return model(input_ids=ids, labels=labels).loss


def on_hidden_states(loss: LinearCrossEntropy) -> Loss:
    """A fused loss in the place of the model's head and loss."""

    def whole(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        causal = causal_model(model)
        hidden = causal.base_model(input_ids=ids).last_hidden_state
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        return loss(hidden.flatten(0, 1), causal.get_output_embeddings().weight, shifted, "mean")

    return whole


def patched_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """The model's own call, patched as a user would patch it; here anew for each step, which takes far less than a ms."""
    with patch(model) as handle:
        loss = own_loss(model, ids, labels)
        if handle.tally.fused != 1:
            raise RuntimeError(f"the loss was not fused: {report_of(model)}")
    return loss


def patched_loss_on_all_rows(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """There is no switch: the plan is told that skipping does not pay."""
    with never_skipping():
        return patched_loss(model, ids, labels)


def _liger_kernel() -> LinearCrossEntropy:
    return linear_cross_entropy_providers()["liger_kernel"].load()


THROUGH = {
    "transformers": "the model",
    "liger": "patch",
    "liger_all_rows": "patch",
    "liger_kernel": "hidden states",
}
"""Where a loss is put in."""
LOSSES: dict[str, Callable[[], Loss]] = {
    "transformers": lambda: own_loss,
    "liger": lambda: patched_loss,
    "liger_all_rows": lambda: patched_loss_on_all_rows,
    "liger_kernel": lambda: on_hidden_states(_liger_kernel()),
}
"""Under their names in reports; each is loaded when it is first needed."""


@dataclass(frozen=True)
class Batch:
    """The tokens of a step, with a share of labels."""

    ids: Tensor
    labels: Tensor
    share: float

    @staticmethod
    def make(vocab: int, share: float, sequences: int, length: int, device: torch.device) -> Batch:
        """Random tokens; the first part of every sequence has no label."""
        ids = torch.randint(vocab, (sequences, length), generator=torch.Generator(device).manual_seed(0), device=device)
        labels = ids.clone()
        labels[:, : round(length * (1 - share / 100))] = -100
        return Batch(ids, labels, share)


def prepare(model: Any, batch: Batch, loss: Loss) -> Callable[[], Tensor]:
    """A step on parameters without gradients; it returns the loss's value."""
    model.zero_grad(set_to_none=True)

    def step() -> Tensor:
        value = loss(model, batch.ids, batch.labels)
        value.backward()
        return value.detach()

    return step


def measure_share(
    setup: Setup, model: Any, batch: Batch, losses: Mapping[str, Loss], arguments: argparse.Namespace, report: Report
) -> dict[str, Quantiles]:
    """Values and memory in one round, times in the others; what does not compute the loss is left out."""
    device, where = batch.ids.device, f"{setup.name} {batch.share:g} %"
    describe_row = functools.partial(_measurement, setup, batch, arguments.compile)
    values: dict[str, float] = {}
    found: list[Measurement] = []
    for name, loss in losses.items():
        try:
            value, peak_mib = _value_and_peak_mib(prepare(model, batch, loss), device)
            right = values.get("transformers", value)
            if not abs(value - right) <= NOISE * right:
                raise ArithmeticError(f"the loss is {value}, that of transformers {right}")
        except Exception as error:  # noqa: BLE001 - whatever a loss raises is a line of the report
            report.failed(name, where, error)
            continue
        values[name] = value
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        for metric, unit, once in (("loss", "nat", value), ("gradient_norm", "1", norm), ("memory", "MiB", peak_mib)):
            if once is not None:
                found.append(describe_row(name, metric, unit, Quantiles(once, once, once)))
    host_ms: dict[str, list[float]] = {name: [] for name in values}

    def prepare_timed(name: str) -> Callable[[], None]:
        step = prepare(model, batch, losses[name])

        def run() -> None:
            start = time.perf_counter()
            step()
            host_ms[name].append((time.perf_counter() - start) * 1e3)

        return run

    steps = {name: functools.partial(prepare_timed, name) for name in values}
    synchronize = functools.partial(_synchronize, device)
    times = interleaved_ms(steps, arguments.rounds, synchronize=synchronize, warm_up=0)
    model.zero_grad(set_to_none=True)
    report.measurements += [describe_row(name, "speed", "ms", y) for name, y in times.items()]
    report.measurements += [describe_row(name, "host", "ms", Quantiles.of(host_ms[name])) for name in times]
    report.measurements += found
    report.say(f"{where}: " + ", ".join(f"{name} {y.p50:.1f}" for name, y in times.items()))
    return times


def _value_and_peak_mib(step: Callable[[], Tensor], device: torch.device) -> tuple[float, float | None]:
    if device.type != "cuda":
        return float(step()), None
    torch.cuda.reset_peak_memory_stats(device)
    value = float(step())
    torch.cuda.synchronize(device)
    return value, torch.cuda.max_memory_allocated(device) / (1 << 20)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measurement(
    setup: Setup, batch: Batch, compiled: bool, provider: str, metric: str, unit: str, y: Quantiles
) -> Measurement:
    config = {
        "model": setup.name,
        "compiled": compiled,
        "through": THROUGH[provider],
        "trained": "lora" if setup.lora else "all",
        "H": setup.head.hidden,
        "V": setup.head.vocab,
        "layers": setup.layers,
        "sequences": batch.ids.shape[0],
        "length": batch.ids.shape[1],
        "labelled": int((batch.labels[:, 1:] != -100).sum()),
        "dtype": "bfloat16",
        "transformers": installed_version("transformers"),
        "version": provider_version(provider),
    }
    label = "labelled tokens (%)"
    return Measurement("training_step", provider, "full", metric, unit, "share", label, batch.share, y, config)


def measure_model(
    setup: Setup, names: Sequence[str], arguments: argparse.Namespace, report: Report
) -> dict[float, dict[str, Quantiles]]:
    """Every share that is due; the model is made for the first of them, and gone afterwards."""
    facts = {"model": setup.name, "sequences": arguments.sequences, "length": arguments.length}
    found: dict[float, dict[str, Quantiles]] = {}
    model, losses = None, {}
    for share in arguments.shares:
        if not report.due(f"{setup.name} {share:g} %", x_value=share, compiled=arguments.compile, **facts):
            continue
        if model is None:
            gc.collect()  # the model before, whose parts refer to each other
            try:
                model = setup.build(report.device, compiled=arguments.compile)
            except Exception as error:  # noqa: BLE001 - a package that is missing, or a GPU that is too small
                report.failed("everything", setup.name, error)
                break
            report.say(f"{setup.name}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters")
            losses = load_losses(names, setup.name, report)
        batch = Batch.make(setup.head.vocab, share, arguments.sequences, arguments.length, report.device)
        found[share] = measure_share(setup, model, batch, losses, arguments, report)
    return found


def load_losses(names: Iterable[str], where: str, report: Report) -> dict[str, Loss]:
    """Those that load; the report is told of the others."""
    losses = {}
    for name in names:
        try:
            losses[name] = LOSSES[name]()
        except Exception as error:  # noqa: BLE001 - a package that breaks on import is missing, whatever it raised
            report.failed(name, where, error)
    return losses


def print_tables(found: Mapping[tuple[str, float], Mapping[str, Quantiles]]) -> None:
    """Times, and ours over the others."""
    rows = []
    for (model, share), times in found.items():
        ours = times.get("liger")
        others = [name for name in LOSSES if name != "liger"]
        ratios = [f"{ours.p50 / times[name].p50:.3f}" if ours and name in times else "" for name in others]
        rows.append((model, f"{share:g}", *(f"{times[name].p50:.1f}" if name in times else "" for name in LOSSES), *ratios))
    over = [f"liger / {name}" for name in LOSSES if name != "liger"]
    if rows:
        print("\nms per step: forward and backward\n")
        print_markdown(("model", "labelled, %", *LOSSES, *over), rows)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    prog, summary = "python -m benchmark.benchmark_training_step", (__doc__ or "").splitlines()[0]
    top = argparse.ArgumentParser(prog=prog, description=summary)
    top.add_argument("--models", nargs="+", choices=SETUPS, default=list(SETUPS), help="default: all")
    shown = " ".join(f"{share:g}" for share in SHARES)
    top.add_argument("--shares", nargs="+", type=_percent, default=list(SHARES), help=f"default: {shown} percent")
    top.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), help="default: all")
    top.add_argument("--sequences", type=int, default=SEQUENCES, help="default: %(default)s")
    top.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence (default: %(default)s)")
    top.add_argument("--rounds", type=int, default=ROUNDS, help="timed steps of each loss (default: %(default)s)")
    top.add_argument("--compile", action="store_true", help="the model's layers by torch.compile; the losses run as they are")
    top.add_argument("--budget-s", type=float, default=540.0, help="what is then left is left out (default: 540)")
    top.add_argument("--fresh", action="store_true", help="measure again what the file already has")
    top.add_argument("--device", type=torch.device, default=default_device())
    top.add_argument("--out", type=Path, default=DATA / "training_step.csv", help="default: %(default)s")
    return top


def _percent(text: str) -> float:
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 100]")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    arguments = parser().parse_args(argv)
    device = arguments.device
    report = Report(arguments.out, device, arguments.budget_s, resume=not arguments.fresh)
    report.expect("training step", len(arguments.models) * len(arguments.shares))
    print(describe(device), flush=True)
    found: dict[tuple[str, float], dict[str, Quantiles]] = {}
    try:
        for name in arguments.models:
            for share, times in measure_model(SETUPS[name], arguments.losses, arguments, report).items():
                found[name, share] = times
        report.finish()
    finally:
        report.end()
        print_tables(found)
        print(f"\n{describe(device)}; wrote {arguments.out}")


if __name__ == "__main__":
    main()
