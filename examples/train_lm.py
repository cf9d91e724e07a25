"""Train a small decoder-only transformer on real text through `liger.LigerFusedLinearCrossEntropyLoss`.

The text is the standard library of the Python that runs this, or your own (`--text`). A byte-level BPE is trained on it
first. As in instruction tuning only part of the tokens is labelled: comments and docstrings are the prompt, the code is
the answer (in text that is not Python: the first half of each paragraph's words and the second), and the loss layer
leaves the prompt's rows out of the product with the vocabulary. Every so many steps the same batch also goes through
`F.linear` and `F.cross_entropy`; at the end a table compares what the two cost, and the loss curve is drawn.

    python examples/train_lm.py
    python examples/train_lm.py --text README.md docs --vocab 4096 --steps 200
    python examples/train_lm.py --device cuda --dtype bfloat16 --batch 64 --dim 512 --heads 8 --steps 2000

On a CPU the same seed gives the same run, digit by digit; on a GPU up to the order of its atomic additions.
A mistake in the arguments or the text ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

try:
    import torch
    from torch import Tensor
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    import liger
    from _lm.choice import chosen_backend
    from _lm.loss_cost import LossCost, measure, unfused_loss
    from _lm.model import ModelConfig, Transformer
    from _lm.report import History, backend_rows, draw_loss_curve, format_table
    from _lm.text import InputError, load_corpus
    from _lm.tokens import (
        IGNORE_INDEX,
        MIN_VOCABULARY,
        Sequences,
        batches,
        encode,
        make_sequences,
        split_held_out,
        train_tokenizer,
        unigram_entropy,
    )
    from liger.dispatch import Explanation
except ModuleNotFoundError as missing:
    print(f"error: the package {missing.name} is not installed; pip install -e '.[demo]' brings it", file=sys.stderr)
    sys.exit(2)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
WARMUP_STEPS = 10
LAST_STEPS = 10
"""So many steps are averaged as the last training loss."""
HELD_OUT_SEQUENCES = 32
BLOCK_LR_SHARE = 0.25
"""Learning rate of the blocks as a share of --lr, that of the vocabulary's rows: those rarely see their own token."""
COST_REPEATS = 5


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    text: tuple[Path, ...]
    text_mb: float
    vocab: int
    device: torch.device
    dtype: torch.dtype
    backend: str | None
    steps: int
    batch: int
    seq: int
    dim: int
    layers: int
    heads: int
    tied: bool
    lr: float
    check_every: int
    seed: int
    out: Path


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def positive_int(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def seed(text: str) -> int:
    """Parse a whole number that fits a random generator's seed."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)


def make_parser(documentation: str | None = __doc__) -> OneLineParser:
    """Describe the command line of the program whose docstring is given."""
    summary, _, details = (documentation or "").partition("\n\n")
    parser = OneLineParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--text", nargs="+", type=Path, default=[], metavar="PATH", help="files or directories (default: Python's own)")
    add("--text-mb", type=positive_float, default=4.0, help="read at most so many million characters (default: 4)")
    add("--vocab", type=positive_int, default=32_768, help="entries of the BPE (default: 32768)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    add("--dtype", choices=DTYPES, default="float32", help="of the matrix products and the loss (default: float32)")
    add("--backend", help="of the loss: triton, cutedsl, torch, auto (default: $LIGER_BACKEND, else auto)")
    add("--steps", type=positive_int, default=120, help="optimizer steps (default: 120)")
    add("--batch", type=positive_int, default=8, help="sequences a step (default: 8)")
    add("--seq", type=positive_int, default=128, help="tokens a sequence (default: 128)")
    add("--dim", type=positive_int, default=128, help="hidden size (default: 128)")
    add("--layers", type=positive_int, default=3, help="transformer blocks (default: 3)")
    add("--heads", type=positive_int, default=4, help="attention heads (default: 4)")
    add("--tied", action="store_true", help="the head's weight is the embedding")
    add("--untied", action="store_false", dest="tied", help="the head has its own weight (default; learns faster)")
    add("--lr", type=positive_float, default=0.012, help="highest learning rate; blocks take a quarter (default: 0.012)")
    add("--check-every", type=positive_int, default=20, help="steps between checks: unfused, held-out (default: 20)")
    add("--seed", type=seed, default=0, help="of text order, initial weights and batches (default: 0)")
    add("--out", type=Path, default=Path("train_lm.png"), help="the loss curve (default: train_lm.png)")
    return parser


def usable_device(name: str) -> torch.device:
    """Return a device that can be computed on here, or raise InputError."""
    usable = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        count = torch.accelerator.device_count()
        usable += [accelerator.type, *(f"{accelerator.type}:{index}" for index in range(count))]
    if name not in usable:
        raise InputError(f"--device {name} cannot be used: PyTorch finds {', '.join(usable)} here")
    return torch.device(name)


def parse_settings(arguments: Sequence[str] | None, documentation: str | None = __doc__) -> Settings:
    """Read and check the command line; what is wrong with it exits (argparse) or raises InputError."""
    options = make_parser(documentation).parse_args(arguments)
    if options.vocab < MIN_VOCABULARY:
        raise InputError(f"--vocab must be at least {MIN_VOCABULARY} (all bytes and the end of text), got {options.vocab}")
    if options.dim % (2 * options.heads):
        raise InputError(f"--dim must be a multiple of 2 x --heads = {2 * options.heads}, got {options.dim}")
    target = options.out if options.out.exists() else options.out.parent
    if options.out.is_dir() or not os.access(target, os.W_OK):
        raise InputError(f"--out {options.out} cannot be written: it must be a file in a directory one may write to")
    options.text = tuple(options.text)
    options.dtype = DTYPES[options.dtype]
    options.device = usable_device(options.device)
    return Settings(**vars(options))


def explain_loss(settings: Settings, vocabulary: int) -> Explanation:
    """Ask which backend the loss layer gets; none at all, or an unknown one, is an InputError."""
    shape = (settings.batch * settings.seq, vocabulary, settings.dim)
    return chosen_backend("the loss", settings.device, settings.dtype, shape, settings.backend)


class TrainingError(Exception):
    """Training cannot go on; the message is one line for the user to read."""


@dataclass(frozen=True)
class StepResult:
    """Losses of a batch before the step it was used for, nats per labelled token."""

    loss: float
    unfused_loss: float | None
    """The same by way of all logits, if compared in this step."""


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    warmup = min(WARMUP_STEPS, steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class Trainer:
    """Model, optimizer and loss layer."""

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        self.settings = settings
        config = ModelConfig(vocabulary, settings.dim, settings.layers, settings.heads, settings.seq, settings.tied)
        self.model = Transformer(config).to(settings.device)
        if settings.dtype == torch.float64:
            self.model.double()
        self.loss_layer = liger.LigerFusedLinearCrossEntropyLoss(backend=settings.backend)
        blocks = list(self.model.blocks.parameters())
        others = [parameter for name, parameter in self.model.named_parameters() if not name.startswith("blocks.")]
        groups = [
            {"params": blocks, "weight_decay": 0.1, "lr_share": BLOCK_LR_SHARE},
            {"params": others, "weight_decay": 0.0, "lr_share": 1.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        # Gradients of a mean over a thousand tokens are too small for float16 unless they are scaled up.
        self.scaler = torch.amp.GradScaler(settings.device.type, enabled=settings.dtype == torch.float16)

    def loss_inputs(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the model up to its head: (head weight (V, H), hidden states (N, H), targets (N,))."""
        device, dtype = self.settings.device, self.settings.dtype
        narrow = dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(device.type, dtype if narrow else None, enabled=narrow):
            hidden = self.model(inputs.to(device))
        return self.model.head_weight.to(dtype), hidden.flatten(0, 1).to(dtype), targets.to(device).flatten()

    def step(self, number: int, inputs: Tensor, targets: Tensor) -> StepResult:
        """Take optimizer step `number` (from 0); every so many also compute the loss the unfused way."""
        loss_inputs = self.loss_inputs(inputs, targets)
        loss = self.loss_layer(*loss_inputs)
        unfused = None
        if number % self.settings.check_every == 0:
            with torch.no_grad():
                unfused = self.unfused_loss(*loss_inputs).item()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.clip_gradients()
        lr = self.settings.lr * learning_rate_factor(number, self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_share"]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return StepResult(loss.item(), unfused)

    def unfused_loss(self, weight: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
        """Compute the loss by way of all logits."""
        return unfused_loss(weight, hidden, target)

    def clip_gradients(self) -> None:
        """Bring the norm of all gradients together down to 1."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    @torch.no_grad()
    def held_out_loss(self, held_out: Sequences) -> float:
        """Mean loss over the labelled tokens of the held-out text."""
        total, labelled = 0.0, 0
        size = self.settings.batch
        for start in range(0, len(held_out.inputs), size):
            targets = held_out.targets[start : start + size]
            count = int((targets != IGNORE_INDEX).sum())
            loss = self.loss_layer(*self.loss_inputs(held_out.inputs[start : start + size], targets))
            total += count * loss.item()
            labelled += count
        return total / labelled

    def loss_cost(self, training: Sequences) -> dict[str, LossCost]:
        """Cost of the loss layer, fused and unfused, on the trained model's hidden states of one batch."""
        batch = next(batches(training, self.settings.batch, torch.Generator().manual_seed(self.settings.seed)))
        with torch.no_grad():
            loss_inputs = self.loss_inputs(*batch)
        return measure({"fused": self.loss_layer, "unfused": unfused_loss}, *loss_inputs, repeats=COST_REPEATS)


@dataclass(frozen=True)
class Data:
    """The text, ready to train on."""

    training: Sequences
    held_out: Sequences
    vocabulary: int
    unigram_entropy: float
    """Of the labelled training tokens, nats per token."""
    summary: str


def prepare_data(settings: Settings) -> Data:
    """Read the text, train the BPE on it, encode it and split it."""
    start = time.perf_counter()
    corpus = load_corpus(settings.text, int(1e6 * settings.text_mb), settings.seed)
    tokenizer = train_tokenizer(corpus, settings.vocab)
    stream = encode(corpus, tokenizer)
    training, held_out = split_held_out(make_sequences(stream, settings.seq), settings.batch, HELD_OUT_SEQUENCES)
    source = "Python's standard library" if not settings.text else ", ".join(map(str, settings.text))
    skipped = f", {corpus.skipped} files skipped that are not text" if corpus.skipped else ""
    summary = (
        f"{source}: {len(corpus.documents)} files{skipped}, {corpus.characters / 1e6:.2f} million characters, "
        f"{stream.ids.numel():,} tokens; read, BPE trained and encoded in {time.perf_counter() - start:.0f} s"
    )
    entropy = unigram_entropy(training.labelled)
    return Data(training, held_out, tokenizer.get_vocab_size(), entropy, summary)


def train(trainer: Trainer, data: Data) -> tuple[History, float]:
    """Run all steps with a progress bar; returns the losses and the largest difference from the unfused loss."""
    settings = trainer.settings
    history = History()
    largest_difference = 0.0
    seconds = 0.0
    generator = torch.Generator().manual_seed(settings.seed)
    chosen = itertools.islice(batches(data.training, settings.batch, generator), settings.steps)
    with tqdm(total=settings.steps, unit="step", dynamic_ncols=True) as progress:
        for number, (inputs, targets) in enumerate(chosen):
            if number % settings.check_every == 0:
                history.held_out.append((number, trainer.held_out_loss(data.held_out)))
            start = time.perf_counter()
            result = trainer.step(number, inputs, targets)
            seconds += time.perf_counter() - start
            if not math.isfinite(result.loss):
                raise TrainingError(f"the loss of step {number + 1} is {result.loss}; try a lower --lr or float32")
            history.training.append((number, result.loss))
            if result.unfused_loss is not None:
                difference = result.loss - result.unfused_loss
                largest_difference = max(largest_difference, abs(difference))
                progress.write(
                    f"step {number + 1:>4}: fused {result.loss:.6f}, unfused {result.unfused_loss:.6f}, difference "
                    f"{difference:+.1e}; held-out {history.held_out[-1][1]:.3f}, unigram {data.unigram_entropy:.3f}"
                )
            tokens_per_second = (number + 1) * inputs.numel() / seconds
            progress.set_postfix_str(f"loss {result.loss:.3f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
            progress.update()
    history.held_out.append((settings.steps, trainer.held_out_loss(data.held_out)))
    return history, largest_difference


def result_rows(
    trainer: Trainer, data: Data, history: History, largest_difference: float, seconds: float
) -> list[tuple[str, str]]:
    """Collect what the run showed, as (label, value) rows."""
    settings = trainer.settings
    cost = trainer.loss_cost(data.training)
    fused, unfused = cost["fused"], cost["unfused"]
    labelled_share = data.training.labelled_share
    return [
        *backend_rows(explain_loss(settings, data.vocabulary)),
        ("labelled", f"{labelled_share:.1%} of the training tokens; the rest (the prompt) is ignored by the loss"),
        ("unigram entropy", f"{data.unigram_entropy:.3f} nats per labelled token"),
        (
            "training loss",
            f"first {history.training[0][1]:.3f}, last {history.last_training_loss(LAST_STEPS):.3f} "
            f"(mean of the last {min(LAST_STEPS, settings.steps)} steps)",
        ),
        ("held-out loss", f"first {history.held_out[0][1]:.3f}, last {history.held_out[-1][1]:.3f}"),
        ("fused - unfused", f"at most {largest_difference:.1e} in the loss of the same batch"),
        (
            "loss layer, time",
            f"fused {fused.milliseconds:,.0f} ms, unfused {unfused.milliseconds:,.0f} ms "
            f"({fused.milliseconds / unfused.milliseconds:.2f}x), forward and backward, medians of {COST_REPEATS}",
        ),
        ("loss layer, memory", memory_comparison(fused, unfused)),
        ("whole run", f"{seconds:.0f} s"),
        ("loss curve", str(settings.out)),
    ]


def memory_comparison(fused: LossCost, unfused: LossCost) -> str:
    """Compare the peaks in words."""
    if fused.peak_extra_bytes is None or unfused.peak_extra_bytes is None:
        return "not measurable on this device"
    fused_mib, unfused_mib = fused.peak_extra_bytes / 2**20, unfused.peak_extra_bytes / 2**20
    return (
        f"fused {fused_mib:,.1f} MiB, unfused {unfused_mib:,.1f} MiB ({fused_mib / unfused_mib:.2f}x), "
        "peak beyond the inputs, gradients included"
    )


def run(settings: Settings) -> None:
    """Prepare, train and report."""
    start = time.perf_counter()
    explain_loss(settings, settings.vocab)  # what cannot run is said before any work
    torch.manual_seed(settings.seed)
    data = prepare_data(settings)
    print(data.summary)
    if data.vocabulary < settings.vocab:
        print(f"the text gives a vocabulary of {data.vocabulary:,} only; {settings.vocab:,} were asked for")
    trainer = Trainer(settings, data.vocabulary)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(
        f"model: {parameters / 1e6:.1f} million parameters, vocabulary {data.vocabulary:,}, "
        f"{'tied' if settings.tied else 'untied'} head; "
        f"{settings.steps} steps of {settings.batch} x {settings.seq} tokens"
    )
    history, largest_difference = train(trainer, data)
    dtype = str(settings.dtype).removeprefix("torch.")
    title = f"vocabulary {data.vocabulary:,}, hidden size {settings.dim}, {settings.device}, {dtype}"
    draw_loss_curve(history, data.unigram_entropy, title, settings.out)
    rows = result_rows(trainer, data, history, largest_difference, time.perf_counter() - start)
    print(format_table(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    try:
        run(parse_settings(arguments))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
