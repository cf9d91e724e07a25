"""TRL: per-token log-probabilities of its trainers from this package's rows, in place of TRL's own functions.

TRL's trainers score tokens through two names of `trl.trainer.utils`: `_ChunkedLogProbFunction`, which projects hidden states
chunk by chunk, and `selective_log_softmax`, for logits that are there. `install` replaces both, with the same arguments and
results. What goes through the row kernels: log-probabilities, their gradient, and whether a token is the most likely one.
The entropy and TRL's two other statistics, which no kernel of this package has, are computed beside them in torch, from the
kernels' lse, a few rows at a time.

A head that DeepSpeed ZeRO-3 partitions is left to TRL's own function. It has data only inside of a context that gathers it,
which that function enters again in backward.

Example:
    >>> remove = install()
    >>> GRPOTrainer(model, reward_funcs=reward, train_dataset=dataset).train()
    >>> remove()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import dispatch, spec
from ..autograd import check_head_kept, refuse_second_derivative
from ..backends import linear
from ..backends.plan import Plan, plan_for, within_memory
from ..call import Call
from ..checks import check_target_values
from ..context import autocast_dtype, in_backward, without_autocast
from ..functional import liger_cross_entropy, liger_fused_linear_cross_entropy
from ..options import CrossEntropyOptions, CrossEntropyOutput
from ..run import prepared
from ..spec import RowInputs, RowResults

TILE_TOKENS = 4096
"""Rows of TRL's tile of `chunk_size` columns: what is alive at once here has as many elements."""
BLOCK_ELEMENTS = 1 << 24
"""Elements of the float32 temporaries of the statistics in torch."""
NO_TOKEN = -(2**31)
"""An index that marks rows to leave out; TRL gives it no other meaning."""
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class ChunkedLogProb:
    """What stands for TRL's function; `apply` is called as an autograd Function's."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """(log-probability, entropy, log of the sum of squared probabilities, mean logit, whether the target is the arg max).

        Args:
            hidden: (N, H).
            weight: (V, H) of the head. TRL's own function takes one that DeepSpeed ZeRO-3 partitions.
            bias: (V,) of the head.
            targets: (N,) class ids.
            temperature: that divides the logits, after the soft cap.
            chunk_size: columns of TRL's tile; here it says how many logits exist at once.
            final_logit_softcapping: soft cap.
            logit_scale: that multiplies the logits, before the soft cap.
            outputs: which of the optional results are wanted; the others are None. The first is differentiable.
        """
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        if hasattr(weight, "ds_id") or hasattr(bias, "ds_id"):  # DeepSpeed's mark of what it partitions
            own = _original("_ChunkedLogProbFunction")
            arguments = (targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
            return own.apply(hidden, weight, bias, *arguments)  # type: ignore[no-any-return]
        if autocast_dtype(hidden) is None:  # TRL projects in the hidden states' dtype
            weight = weight.to(hidden.dtype)
            bias = None if bias is None else bias.to(hidden.dtype)
        # (c / T) tanh(l x / c) is what softcap c / T and scale l / T make of x.
        options: dict[str, Any] = {
            "ignore_index": NO_TOKEN,
            "reduction": "none",
            "logit_scale": logit_scale / temperature,
            "softcap": None if final_logit_softcapping is None else final_logit_softcapping / temperature,
            "chunk_size": max(1, TILE_TOKENS * chunk_size // weight.shape[0]),
            "return_predicted_tokens": "is_top1" in outputs,
        }
        if set(outputs) <= {"log_probs", "is_top1"}:
            output = liger_fused_linear_cross_entropy(hidden, weight, targets, bias, **options)
            if not isinstance(output, CrossEntropyOutput):
                return -output.float(), None, None, None, None
            return -output.loss.float(), None, None, None, output.predicted_tokens == targets  # type: ignore[return-value]
        chosen = CrossEntropyOptions(**options)
        call = prepared(hidden, targets, chosen, op="fused_linear_cross_entropy", weight=weight, bias=bias)
        found = _Statistics.apply(call.input, call.weight, call.bias, call, tuple(outputs))  # type: ignore[no-untyped-call]
        return found  # type: ignore[no-any-return]


class _Statistics(torch.autograd.Function):
    """Log-probabilities and entropy, two differentiable results, in the loop of fused linear cross entropy."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, outputs: tuple[str, ...]
    ) -> tuple[Tensor | None, ...]:
        implementation = dispatch.resolve(call.request())
        if implementation.checks_target:
            check_target_values(call.target, call.vocab, call.options.ignore_index)
        ctx.set_materialize_grads(False)
        kernels, inputs = implementation.kernels(), call.row_inputs()
        like = call.input.new_empty(0, dtype=plan_for(call).gemm_dtype)
        results = RowResults.empty(call.rows, like, call.options, keep_lse=True)
        lse = _lse(results)
        wanted = {name: torch.empty_like(results.loss) for name in OUTPUTS[:3] if name in outputs}

        def run(plan: Plan) -> None:
            for chunk in linear.Projection(call, plan, kernels).chunks(None):
                logits, span = chunk.logits, chunk.span
                kernels.rows(logits, inputs.select(span), results.narrow(span), None)
                for block in _blocks(logits) if wanted else ():
                    there = slice(span.start + block.start, span.start + block.stop)
                    s, log_p = _log_probabilities(logits[block], inputs, lse[:, there])
                    if "entropy" in wanted:
                        wanted["entropy"][there] = torch.special.entr(log_p.exp()).sum(-1)
                    if "log_sum_sq_probs" in wanted:
                        wanted["log_sum_sq_probs"][there] = torch.logsumexp(2 * log_p, -1)
                    if "mean_logits" in wanted:
                        wanted["mean_logits"][there] = s.mean(-1)

        with without_autocast(hidden):
            within_memory(call, run, gradients=False)
        top = None if results.predicted is None else results.predicted == call.target
        entropy, squares, means = (wanted[name].float() if name in wanted else None for name in OUTPUTS[:3])
        ctx.mark_non_differentiable(*(part for part in (squares, means, top) if part is not None))
        ctx.save_for_backward(*call.tensors, lse, wanted.get("entropy"))
        ctx.recipe, ctx.implementation, ctx.head_shape = call.recipe, implementation, call.head.shape
        return -results.loss.float(), entropy, squares, means, top

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: None) -> tuple[Any, ...]:
        refuse_second_derivative()
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 5
        input, target, weight, bias, class_weight, num_items, lse, entropy = ctx.saved_tensors
        call = Call(input, target, weight, bias, class_weight, ctx.recipe, num_items)
        check_head_kept(call, ctx.head_shape)
        kernels, inputs = ctx.implementation.kernels(), call.row_inputs()
        upstream = lse.new_zeros(call.rows) if grad_log_probs is None else -grad_log_probs.to(lse.dtype)

        def write_gradient(logits: Tensor, span: slice) -> None:
            if grad_entropy is None:
                kernels.row_grad(logits, inputs.select(span), lse[:, span], upstream[span], logits)
                return
            for block in _blocks(logits):
                there = slice(span.start + block.start, span.start + block.stop)
                part = logits[block]
                # Kernels write a gradient in the logits' dtype: these are widened, so that both parts are rounded once.
                total = part.to(lse.dtype, copy=True)
                kernels.row_grad(total, inputs.select(there), lse[:, there], upstream[there], total)
                s, log_p = _log_probabilities(part, inputs, lse[:, there])
                p = log_p.exp()
                slope = torch.special.entr(p) - p * entropy[there, None]  # -p (log p + H), where p may be 0
                slope *= grad_entropy[there, None] * inputs.options.logit_scale
                if inputs.options.softcap is not None:
                    slope *= 1 - (s / inputs.options.softcap) ** 2
                part.copy_(total.add_(slope))

        with in_backward(input):
            return (*linear.gradients_from(call, kernels, None, write_gradient), None, None)


def _lse(results: RowResults) -> Tensor:
    if results.lse is None:
        raise RuntimeError("the statistics of rows were computed without their lse")
    return results.lse


def _log_probabilities(logits: Tensor, inputs: RowInputs, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, and log p, of some rows in the compute dtype."""
    s = spec.scores(logits, inputs.options)
    return s, (s - lse[0][:, None]).sub_(lse[1][:, None])


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows, vocab = logits.shape
    step = max(1, BLOCK_ELEMENTS // vocab)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def selective_log_softmax(logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None) -> Tensor:
    """Log-probabilities of `index` (...) under logits (..., V), as `trl.trainer.utils.selective_log_softmax`.

    Args:
        logits: (..., V).
        index: (...) class ids; several per row, (..., K), are left to TRL's own function.
        temperature: that divides the logits, > 0.
        row_mask: (...) rows where it is 0 give 0.
    """
    if index.ndim == logits.ndim or index.dtype not in (torch.int64, torch.int32):
        return _original("selective_log_softmax")(logits, index, temperature, row_mask)  # type: ignore[no-any-return]
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    target = index if row_mask is None else index.masked_fill(row_mask == 0, NO_TOKEN)
    loss = liger_cross_entropy(logits, target, ignore_index=NO_TOKEN, reduction="none", logit_scale=1 / temperature)
    if not isinstance(loss, Tensor):
        raise TypeError("a loss without extras is one tensor")
    return -loss


REPLACED: dict[str, Any] = {"_ChunkedLogProbFunction": ChunkedLogProb, "selective_log_softmax": selective_log_softmax}
_originals: dict[str, Any] = {}


def _original(name: str) -> Any:
    from trl.trainer import utils

    return _originals.get(name) or getattr(utils, name)


def install() -> Callable[[], None]:
    """Let TRL's trainers score tokens through this package, in every module of TRL that holds one of the names.

    Returns:
        A function that gives TRL its own back.

    Raises:
        ValueError: it is installed already, or this TRL has no such names.
    """
    from trl.trainer import utils

    if _originals:
        raise ValueError("the functions of TRL must not be replaced already: call what install() returned first")
    missing = [name for name in REPLACED if not hasattr(utils, name)]
    if missing:
        raise ValueError(f"trl must be one whose trainer.utils has {', '.join(REPLACED)}; this one lacks {', '.join(missing)}")
    _originals.update({name: getattr(utils, name) for name in REPLACED})
    _exchange(_originals, REPLACED)

    def remove() -> None:
        _exchange(REPLACED, _originals)
        _originals.clear()

    return remove


def _exchange(present: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Trainers import these names into their own modules."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "trl":
            for name, value in present.items():
                if vars(module).get(name) is value:
                    setattr(module, name, wanted[name])
