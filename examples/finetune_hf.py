"""Fine-tune a Transformers model on instructions with `Trainer`, through its own loss and through liger's, and compare.

The data are lines of JSON, `{"prompt": "...", "response": "..."}`; without `--data` some are made up. Only the response is
labelled. Without `--model` the model is a small one with random weights, which reads bytes, and whose vocabulary is as large
as a real one's. Both runs start from the same weights and see the same batches; a table shows their losses side by side, and
what a training step took.

    python examples/finetune_hf.py
    python examples/finetune_hf.py --data mine.jsonl --model path/to/a/model --steps 200 --device cuda --dtype bfloat16

A mistake in the arguments or the data ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

try:
    import accelerate  # noqa: F401  # what the Trainer of transformers runs on
    import torch
    import transformers
    from torch.utils.data import Dataset

    from _lm.choice import chosen_backend
    from _lm.loss_cost import peak_extra_bytes
    from _lm.text import InputError
    from liger.dispatch import backends
    from liger.integrations.transformers import patch, report
except ModuleNotFoundError as missing:
    print(f"error: the package {missing.name} is not installed; pip install -e '.[transformers]' brings it", file=sys.stderr)
    sys.exit(2)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
IGNORE_INDEX = -100
FIELDS = ("prompt", "response")
BYTES, END, PAD = 256, 256, 257
"""Ids of the byte-level model: a byte, the end of a text, and what fills up a batch."""
MADE_UP = 256


@dataclass(frozen=True)
class Example:
    """One instruction."""

    prompt: str
    response: str


def read_examples(path: Path) -> list[Example]:
    """The examples of a JSONL file; empty lines are skipped.

    Raises:
        InputError: the file cannot be read, or a line is not an object with two texts; it names the line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from error
    examples = [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not examples:
        raise InputError(f"{path}: there is no example in it")
    return examples


def _read_line(line: str, where: str) -> Example:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(found, dict):
        raise InputError(f"{where}: must be an object with {' and '.join(FIELDS)}, got {type(found).__name__}")
    for name in FIELDS:
        if not isinstance(found.get(name), str):
            what = "is missing" if name not in found else f"must be a text, got {type(found[name]).__name__}"
            raise InputError(f"{where}: {name} {what}")
    if not found["response"]:
        raise InputError(f"{where}: response is empty, so nothing is learned from it")
    return Example(found["prompt"], found["response"])


def make_examples(count: int, seed: int) -> list[Example]:
    """Small tasks on words and numbers, the same for the same seed."""
    chooser = random.Random(seed)
    words = ["apple", "river", "stone", "cloud", "lamp", "horse", "paper", "garden", "window", "silver", "morning", "bridge"]
    examples = []
    for _ in range(count):
        picked, (a, b) = chooser.sample(words, chooser.randint(2, 6)), (chooser.randint(1, 99), chooser.randint(1, 99))
        prompt, response = chooser.choice((
            (f"Sort these words: {' '.join(picked)}", " ".join(sorted(picked))),
            (f"Reverse their order: {' '.join(picked)}", " ".join(reversed(picked))),
            (f"How many words are these: {' '.join(picked)}?", str(len(picked))),
            (f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."),
        ))  # fmt: skip
        examples.append(Example(prompt, response))
    return examples


class Instructions(Dataset[dict[str, Any]]):
    """Token ids of prompt and response, cut to `length`; labels on the response only.

    An example of which no label is left is left out: a batch of such has no mean, and the model's own loss of it is NaN.
    """

    def __init__(self, examples: Sequence[Example], encode: Callable[[str], list[int]], end: int, length: int) -> None:
        self.rows: list[dict[str, list[int]]] = []
        for example in examples:
            prompt, response = encode(example.prompt + "\n"), [*encode(example.response), end]
            ids, labels = (prompt + response)[:length], ([IGNORE_INDEX] * len(prompt) + response)[:length]
            if any(label != IGNORE_INDEX for label in labels[1:]):  # the first one is nobody's next token
                self.rows.append({"input_ids": ids, "labels": labels})
        if not self.rows:
            raise InputError(f"no response begins within --length {length} tokens")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]


def collate(rows: Sequence[dict[str, list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Rows of one batch, filled up on the right."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    attention = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    labels = filled("labels", IGNORE_INDEX)
    return {"input_ids": filled("input_ids", pad), "labels": labels, "attention_mask": torch.tensor(attention)}


def load(settings: argparse.Namespace) -> tuple[Any, Callable[[str], list[int]], int, int]:
    """(model, text to ids, id of the end, id of the padding)."""
    if settings.model is None:
        config = transformers.LlamaConfig(
            vocab_size=settings.vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=settings.length, pad_token_id=PAD, eos_token_id=END,
            tie_word_embeddings=True,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config), lambda text: list(text.encode()), END, PAD
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(settings.model)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {settings.model}: {str(error).splitlines()[0]}") from error
    if tokenizer.eos_token_id is None:
        raise InputError(f"--model {settings.model}: its tokenizer has no token that ends a text")
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return model, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id, pad


def check_backend(model: Any, settings: argparse.Namespace) -> None:
    """Say before anything is trained that no backend can run the fused loss, or that there is none of the name.

    Raises:
        InputError: with every backend's reasons.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise InputError(f"--model {settings.model}: it has no head whose loss could be fused")
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else head.weight.dtype
    shape = (settings.batch * settings.length, *head.weight.shape)
    chosen_backend("the fused loss", torch.device(settings.device), dtype, shape, settings.backend)


@dataclass(frozen=True)
class Run:
    """What one run gave."""

    losses: list[float]
    """Of every optimizer step."""
    step_ms: float
    """Median time of a forward and backward pass."""
    peak_bytes: int | None
    """Most memory that a forward and backward pass took beyond the model; None where the device cannot tell."""
    status: str


def train(model: Any, data: Instructions, pad: int, settings: argparse.Namespace, *, fused: bool) -> Run:
    """Train with `Trainer`, then measure a step of the first batch."""
    handle = patch(model, backend=settings.backend) if fused else None
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=settings.steps, per_device_train_batch_size=settings.batch,
            gradient_accumulation_steps=settings.accumulate, learning_rate=settings.lr, logging_steps=1, report_to="none",
            save_strategy="no", seed=settings.seed, use_cpu=settings.device == "cpu", disable_tqdm=True,
            remove_unused_columns=False, bf16=settings.dtype == "bfloat16", dataloader_pin_memory=settings.device != "cpu",
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=lambda rows: collate(rows, pad))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    batch = {
        name: tensor.to(settings.device)
        for name, tensor in collate([data[i % len(data)] for i in range(settings.batch)], pad).items()
    }

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(settings.device, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            loss = model(**batch).loss
        loss.backward()
        if settings.device == "cuda":
            torch.cuda.synchronize()

    model.train()
    model.zero_grad(set_to_none=True)
    peak = peak_extra_bytes(step, torch.device(settings.device))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    status = report(model).status if fused else "the model's own loss"
    if handle is not None:
        handle.remove()
    return Run(losses, statistics.median(times), peak, status)


def table(plain: Run, fused: Run) -> str:
    """Both runs, side by side."""
    shown = sorted({0, *range(0, len(plain.losses), max(1, len(plain.losses) // 8)), len(plain.losses) - 1})
    lines = [f"{'step':>6}  {'unfused loss':>14}  {'fused loss':>14}"]
    lines += [f"{i + 1:>6}  {plain.losses[i]:>14.6f}  {fused.losses[i]:>14.6f}" for i in shown]
    off = max(abs(a - b) for a, b in zip(plain.losses, fused.losses, strict=True)) / max(map(abs, plain.losses))
    lines += [f"largest difference: {off:.1e} of the loss; the patch says: {fused.status}"]
    lines += [f"forward and backward: {plain.step_ms:.0f} ms unfused, {fused.step_ms:.0f} ms fused"]
    if plain.peak_bytes is not None and fused.peak_bytes is not None:
        mib = [f"{run.peak_bytes / 2**20:.0f} MiB" for run in (plain, fused) if run.peak_bytes is not None]
        lines += [f"memory beyond the model: {mib[0]} unfused, {mib[1]} fused"]
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""

    def at_least(smallest: int) -> Callable[[str], int]:
        def read(text: str) -> int:
            if not text.isdecimal() or int(text) < smallest:
                raise argparse.ArgumentTypeError(f"must be a whole number of at least {smallest}, got {text!r}")
            return int(text)

        return read

    def rate(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
        return value

    parser = _Parser(description="Fine-tune a Transformers model on JSONL instructions, fused and unfused.")
    parser.add_argument("--data", type=Path, help='JSONL of {"prompt": ..., "response": ...}; default: made up')
    parser.add_argument("--model", help="path or name of a causal language model; default: a small random one")
    parser.add_argument("--vocab", type=at_least(258), default=32768, help="of the random model (32768)")
    parser.add_argument("--steps", type=at_least(1), default=20, help="optimizer steps (20)")
    parser.add_argument("--batch", type=at_least(1), default=8, help="examples of a forward pass (8)")
    parser.add_argument("--accumulate", type=at_least(1), default=2, help="forward passes of an optimizer step (2)")
    parser.add_argument("--length", type=at_least(2), default=128, help="most tokens of an example (128)")
    parser.add_argument("--lr", type=rate, default=1e-3, help="learning rate (1e-3)")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16: under autocast")
    parser.add_argument(
        "--backend", choices=("auto", *backends()), help="of the fused loss (default: $LIGER_BACKEND, else auto)"
    )
    settings = parser.parse_args(arguments)
    if settings.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: there is no CUDA device here")
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    settings = parse(arguments)
    transformers.logging.set_verbosity_error()
    try:
        made_up = settings.data is None
        examples = make_examples(MADE_UP, settings.seed) if made_up else read_examples(settings.data)
        torch.manual_seed(settings.seed)
        model, encode, end, pad = load(settings)
        check_backend(model, settings)
        data = Instructions(examples, encode, end, settings.length)
        labelled = sum(label != IGNORE_INDEX for row in data.rows for label in row["labels"])
        tokens = sum(len(row["labels"]) for row in data.rows)
        left_out = f" ({len(examples) - len(data)} left out: too long a prompt)" if len(data) < len(examples) else ""
        print(f"{len(data)} examples{left_out}, {labelled / tokens:.0%} of {tokens} tokens labelled; {type(model).__name__}, "
              f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, on {settings.device}")  # fmt: skip
        model = model.to(settings.device)
        other = copy.deepcopy(model)
        plain = train(model, data, pad, settings, fused=False)
        del model
        print(table(plain, train(other, data, pad, settings, fused=True)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
