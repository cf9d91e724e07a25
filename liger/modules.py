"""The losses as modules, and in the positional `Function.apply` form that code written for Liger-Kernel calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .checks import check_class_weight
from .dispatch.registry import check_backend
from .options import CrossEntropyOptions, CrossEntropyOutput, Reduction
from .run import run
from .vocab_parallel import VocabParallel


class _Loss(nn.Module):
    """Options are built, and checked, once; class weights are a buffer and move with the module."""

    options: CrossEntropyOptions
    backend: str | None

    def extra_repr(self) -> str:
        shown = [f"{name}={value!r}" for name, value in self.options.nondefault()]
        return ", ".join(shown if self.backend is None else [*shown, f"backend={self.backend!r}"])

    def _result(self, output: CrossEntropyOutput) -> Tensor | CrossEntropyOutput:
        return output if self.options.wants_extras else output.loss


class LigerCrossEntropyLoss(_Loss):
    """`liger_cross_entropy` as a module; arguments and errors as there.

    Example:
        >>> loss = LigerCrossEntropyLoss(label_smoothing=0.1)(logits, target)
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        loss_dtype: torch.dtype | None = None,
        in_place: bool = False,
        backend: str | None = None,
        logit_scale: float = 1.0,
        vocab_parallel: VocabParallel | None = None,
    ) -> None:
        super().__init__()
        check_class_weight("weight", weight)
        self.register_buffer("weight", weight)
        check_backend(backend)
        self.backend = backend
        self.options = CrossEntropyOptions(
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
            loss_dtype=loss_dtype,
            in_place=in_place,
            logit_scale=logit_scale,
            vocab_parallel=vocab_parallel,
        )

    def forward(self, input: Tensor, target: Tensor, *, num_items: float | Tensor | None = None) -> Tensor | CrossEntropyOutput:
        """Loss of `input` (..., V) logits and `target` (...)."""
        output = run(
            input,
            target,
            self.options,
            op="cross_entropy",
            class_weight=self.weight,
            num_items=num_items,
            backend=self.backend,
        )
        return self._result(output)


class LigerFusedLinearCrossEntropyLoss(_Loss):
    """`liger_fused_linear_cross_entropy` as a module; arguments and errors as there.

    Example:
        >>> loss = LigerFusedLinearCrossEntropyLoss()(model.lm_head.weight, hidden, target)
    """

    ce_weight: Tensor | None

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        chunk_size: int | None = None,
        backend: str | None = None,
        logit_scale: float = 1.0,
        vocab_parallel: VocabParallel | None = None,
    ) -> None:
        super().__init__()
        check_class_weight("ce_weight", ce_weight)
        self.register_buffer("ce_weight", ce_weight)
        check_backend(backend)
        self.backend = backend
        self.options = CrossEntropyOptions(
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            accum_dtype=accum_dtype,
            use_token_scaling=use_token_scaling,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
            chunk_size=chunk_size,
            logit_scale=logit_scale,
            vocab_parallel=vocab_parallel,
        )

    def forward(
        self,
        lin_weight: Tensor,
        input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        num_items: float | Tensor | None = None,
    ) -> Tensor | CrossEntropyOutput:
        """Loss of `input` (..., H), projected by `lin_weight` (V, H) and `bias` (V,), and `target` (...)."""
        output = run(
            input,
            target,
            self.options,
            op="fused_linear_cross_entropy",
            weight=lin_weight,
            bias=bias,
            class_weight=self.ce_weight,
            num_items=num_items,
            backend=self.backend,
        )
        return self._result(output)


class LigerCrossEntropyFunction:
    """`liger_cross_entropy` called by position; always returns all four outputs."""

    @staticmethod
    def apply(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        loss_dtype: torch.dtype | None = None,
        in_place: bool = False,
    ) -> CrossEntropyOutput:
        """(loss, z_loss, token_accuracy, predicted_tokens), None for what was not asked for."""
        options = CrossEntropyOptions(
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
            loss_dtype=loss_dtype,
            in_place=in_place,
        )
        return run(input, target, options, op="cross_entropy", class_weight=weight)


class LigerFusedLinearCrossEntropyFunction:
    """`liger_fused_linear_cross_entropy` called by position; always returns all four outputs."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> CrossEntropyOutput:
        """(loss, z_loss, token_accuracy, predicted_tokens), None for what was not asked for."""
        options = CrossEntropyOptions(
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            accum_dtype=accum_dtype,
            use_token_scaling=use_token_scaling,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        return run(input, target, options, op="fused_linear_cross_entropy", weight=weight, bias=bias, class_weight=ce_weight)
