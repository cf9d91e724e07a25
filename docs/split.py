"""What a head costs per rank when its vocabulary is split, or when FSDP shards it: bytes by formula, times from one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from results import Result, Run, ms, runs, table

from liger.backends.plan import Plan, make_plan
from liger.exchange import MOST_RANKS, ROW_BYTES

N, V, H = 8192, 128256, 4096  # of one group's batch, and of the head of Llama 3.1 8B
DTYPE = torch.bfloat16
RANKS = (1, 2, 4, 8, 16, 64, 256, 1024)
ITEM = DTYPE.itemsize
KERNEL = "vocab_parallel"
NOT_YET = "*No run on several GPUs is checked in yet.*\n"


def plan(ranks: int) -> Plan:
    """The plan of one rank of so many, as `liger.explain(..., vocab_parallel=ranks)` prints it."""
    return make_plan(
        (N, V, H), "cuda", DTYPE, weight_dtype=DTYPE, chunk_size=None, accum_dtype=None, recompute=False, ranks=ranks
    )


def statistics_bytes(ranks: int) -> int:
    """Sent by a rank: a maximum, a sum and a target logit in fp32 for each row, to every other rank; in kernels with tags."""
    return (ROW_BYTES if ranks <= MOST_RANKS else 12) * N * (ranks - 1)


def sum_bytes(ranks: int) -> float:
    """Sent by a rank over a ring: the gradient of the hidden states, once there and once back."""
    return 2 * (ranks - 1) / ranks * N * H * plan(ranks).sum_dtype.itemsize


def volumes() -> str:
    """Bytes that a rank sends and holds, by number of ranks."""
    head = ("ranks", "chunks", "statistics sent", "dx sent", "weight and its gradient", "logits", "FSDP instead: sent", "held")
    return table(head, (_volume(ranks) for ranks in RANKS))


def _volume(ranks: int) -> tuple[str, ...]:
    whole = V * H * ITEM
    fsdp = 2 * (ranks - 1) / ranks * whole  # gathered, and its gradient scattered
    own = plan(ranks)
    return (
        f"{ranks:,}",
        str(own.chunks),
        _mib(statistics_bytes(ranks)),
        _mib(sum_bytes(ranks)),
        _mib(2 * whole / ranks),
        _mib(own.slab_bytes),
        _mib(fsdp),
        _mib(2 * whole / ranks + (2 * whole if ranks > 1 else 0)),
    )


def of_last_run(write: Callable[[Run], str]) -> Callable[[], str]:
    """What is written of the last run on several GPUs, if there is one."""

    def written() -> str:
        found = runs(KERNEL)
        return write(found[-1]) if found else NOT_YET

    return written


@of_last_run
def predicted(run: Run) -> str:
    """Times by number of ranks, from the constants of one run."""
    times = {r.provider: r.y for r in run.results if r.metric == "speed"}
    ranks_run = int(run.results[0].x)
    one = times["linear, one GPU"]
    per_byte = times["sum of dx alone"] / (2 * (ranks_run - 1) / ranks_run * N * H * ITEM)  # ms
    statistics = times["statistics alone"]
    exchanging = MOST_RANKS if any(r.provider == "linear, split" and _rows(r) for r in run.results) else 1
    lines = []
    for ranks in RANKS:
        own = plan(ranks)
        several = ranks > 1
        # A collective: not below what was measured between those ranks, which is latency; above it the bytes decide.
        latency = statistics if ranks > exchanging else 0.0
        gather = own.chunks * max(latency, statistics_bytes(ranks) / own.chunks * per_byte) if several else 0.0
        summed = sum_bytes(ranks) * per_byte
        hidden = min(summed, one / ranks / 3 / own.chunks)  # behind the last chunk's weight product
        total = one / ranks + gather + summed - hidden
        share = f"{total / one:.3f}"
        lines.append((f"{ranks:,}", ms(one / ranks), ms(gather), ms(summed), ms(hidden), ms(total), share))
    head = ("ranks", "compute", "statistics", "sum of dx", "of it hidden", "step", "of one GPU's time")
    return f"*ms, predicted. Constants: {run.made_on}, {ranks_run} GPUs.*\n\n{table(head, lines)}"


@of_last_run
def times_measured(run: Run) -> str:
    """A step of both losses over the vocabulary that the ranks of a run share, and of one GPU that has all of it."""
    times = {r.provider: r.y for r in run.results if r.metric == "speed"}
    lines = []
    for op, loss in (("linear", "fused linear cross entropy"), ("logits", "cross entropy on given logits")):
        for suffix, reduction in (("", "mean"), (", none", "none")):
            one, split = (times[f"{op}, {what}{suffix}"] for what in ("one GPU", "split"))
            lines.append((loss, reduction, ms(one), ms(split), f"{split / one:.3f}"))
    head = ("loss, forward + backward", "reduction", "one GPU, ms", f"{int(run.results[0].x)} GPUs, ms", "of one GPU's time")
    return f"*{run.made_on}.*\n\n{table(head, lines)}"


@of_last_run
def bytes_measured(run: Run) -> str:
    """What a step sends in collectives and kernels, against the formula and the links' counters."""
    counted = {r.provider: r.y for r in run.results if r.metric == "nvlink_sent"}
    lines = []
    for result in run.results:
        if result.metric != "sent":
            continue
        links = counted.get(result.provider)
        lines.append(
            (
                result.provider,
                _calls(result.config["collectives"]),
                f"{_rows(result):,}",
                f"{result.config['predicted'] / 1e6:.3f}",
                f"{result.y / 1e6:.3f}",
                "" if links is None else f"{links / 1e6:.3f}",
            )
        )
    head = ("step", "collectives", "rows exchanged in kernels", "predicted", "sent", "counted on NVLink")
    return f"*MB that a GPU sends in a step. {run.made_on}.*\n\n" + table(head, lines)


def _rows(result: Result) -> int:
    """How many rows' statistics the kernels of a step exchanged."""
    rows: int = result.config.get("exchanged", 0)  # no run before kernels did has it
    return rows


def _calls(collectives: Iterable[tuple[str, int]]) -> str:
    names = [name for name, _ in collectives]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _mib(size: float) -> str:
    mebibytes = size / (1 << 20)
    return f"{mebibytes:,.0f}" if mebibytes >= 10 else f"{mebibytes:.1f}"
