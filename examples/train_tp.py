"""Train the model of `train_lm.py` with its head split over processes: each holds some of the vocabulary's rows.

    torchrun --nproc-per-node 2 examples/train_tp.py
    torchrun --nproc-per-node 2 examples/train_tp.py --device cuda --dtype bfloat16 --dim 512 --heads 8
    python examples/train_tp.py

The arguments, the text and the loss curve are those of `train_lm.py`, without `--tied` and float16; the last line above is the
same run in one process.
Everything but the head is the same in every process: each sees every token, computes the logits of its own rows only, and
the gradient of the hidden states comes back summed, so that no process drifts from the others. Every so many steps the head
is gathered and the same batch goes through `F.linear` and `F.cross_entropy` on the whole vocabulary.

Processes talk over gloo on CPUs and over NCCL on GPUs, one each.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

import liger
from _lm.report import draw_loss_curve, format_table
from _lm.text import InputError
from train_lm import Data, Settings, Trainer, TrainingError, parse_settings, prepare_data, train

LAST_STEPS = 10


class SplitTrainer(Trainer):
    """A `Trainer` that keeps this process's rows of the head."""

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        super().__init__(settings, vocabulary)
        self.split = liger.VocabParallel.even(vocabulary)
        whole = self.model.head_weight
        own = nn.Parameter(whole.detach()[self.split.start : self.split.stop].clone())
        self.model.head_weight = own
        for group in self.optimizer.param_groups:
            group["params"] = [own if parameter is whole else parameter for parameter in group["params"]]
        self.loss_layer = liger.LigerFusedLinearCrossEntropyLoss(backend=settings.backend, vocab_parallel=self.split)

    def unfused_loss(self, weight: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
        """Compute the loss by way of all logits of the whole vocabulary."""
        return super().unfused_loss(self.split.gather_classes(weight), hidden, target)

    def clip_gradients(self) -> None:
        """Count every process's rows of the head in the norm, and what they have in common once."""
        head = self.model.head_weight
        common = [p.grad for p in self.model.parameters() if p is not head and p.grad is not None]
        gradients = [] if head.grad is None else [head.grad]
        squares = torch.nn.utils.get_total_norm(gradients).square().to(self.settings.device)
        dist.all_reduce(squares)
        norm = (squares + torch.nn.utils.get_total_norm(common).square()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), 1.0, norm)


@contextlib.contextmanager
def process_group(settings: Settings) -> Iterator[Settings]:
    """Join the others, or be alone; gives the settings of this process."""
    backend = "nccl" if settings.device.type == "cuda" else "gloo"
    if dist.is_initialized():
        yield settings
        return
    if "RANK" in os.environ:
        if settings.device.type == "cuda":
            settings = replace(settings, device=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
            torch.cuda.set_device(settings.device)
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield settings
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def only_the_first_speaks() -> Iterator[None]:
    """Inside, what the other processes print goes nowhere."""
    if dist.get_rank() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def shared_data(settings: Settings) -> Data:
    """Prepare the text in one process and hand it to all."""
    told: list[Data | InputError | None] = [None]
    if dist.get_rank() == 0:
        try:
            told = [prepare_data(settings)]
        except InputError as error:
            told = [error]
    dist.broadcast_object_list(told, device=settings.device)
    if not isinstance(told[0], Data):
        raise told[0] or InputError("there is no text")
    return told[0]


def run(settings: Settings) -> list[float]:
    """Train and report; returns the loss of every step."""
    start = time.perf_counter()
    data = shared_data(settings)
    torch.manual_seed(settings.seed)  # the same weights everywhere
    trainer = SplitTrainer(settings, data.vocabulary)
    split = trainer.split
    with only_the_first_speaks():
        print(data.summary)
        print(f"head of {data.vocabulary:,} rows over {split.ranks} processes: {list(split.bounds)}")
        history, largest_difference = train(trainer, data)
        rows = [
            (
                "training loss",
                f"first {history.training[0][1]:.3f}, last {history.last_training_loss(LAST_STEPS):.3f} "
                f"(mean of the last {min(LAST_STEPS, settings.steps)} steps)",
            ),
            ("held-out loss", f"first {history.held_out[0][1]:.3f}, last {history.held_out[-1][1]:.3f}"),
            ("unigram entropy", f"{data.unigram_entropy:.3f} nats per labelled token"),
            ("split - whole", f"at most {largest_difference:.1e} in the loss of the same batch"),
            ("whole run", f"{time.perf_counter() - start:.0f} s"),
            ("loss curve", str(settings.out)),
        ]
        print(format_table(rows))
    if dist.get_rank() == 0:
        title = f"vocabulary {data.vocabulary:,} over {split.ranks} processes, hidden size {settings.dim}"
        draw_loss_curve(history, data.unigram_entropy, title, settings.out)
    return [loss for _, loss in history.training]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    try:
        settings = parse_settings(arguments, __doc__)
        if settings.tied:
            raise InputError("--tied is not possible: the embedding needs all rows, a split head has some of them")
        if settings.dtype == torch.float16:
            raise InputError("--dtype float16 is not possible: a loss scaler would have to be shared by the processes")
        with process_group(settings) as own:
            run(own)
    except (InputError, TrainingError) as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
