"""Compiles every variant of the Triton kernels for one target, without a GPU: `python test/compile_kernels.py cuda 90 32`.

Run in a process of its own, without TRITON_INTERPRET. The launches compiled are the ones the host code makes: its kernels
are replaced by recorders, so that signatures and constants cannot drift apart from it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from liger import spec
from liger.backends import ahead
from liger.backends import triton as backend
from liger.backends.triton import kernels
from liger.exchange import Turn
from liger.options import CrossEntropyOptions

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
KERNELS = ("rows_kernel", "row_stats_kernel", "row_grad_kernel", "scale_kernel", "exchanged_rows_kernel")
COMPILER_OPTIONS = ("num_warps", "num_stages", "debug", "sanitize_overflow")
PLAIN = CrossEntropyOptions()
EVERYTHING = CrossEntropyOptions(
    label_smoothing=0.1,
    lse_square_scale=1e-4,
    softcap=30.0,
    logit_scale=0.5,
    return_z_loss=True,
    return_predicted_tokens=True,
    use_token_scaling=True,
)
EXCHANGED = CrossEntropyOptions(lse_square_scale=1e-4, softcap=30.0, logit_scale=0.5, return_z_loss=True)


class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self, name: str, launches: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append((self.name, args, kwargs))


def launches_of(dtype: torch.dtype, vocab: int, options: CrossEntropyOptions, *, strided: bool) -> None:
    """Call every row kernel once on rows of this kind."""
    logits = torch.zeros(2, vocab * 2, dtype=dtype)[:, ::2] if strided else torch.zeros(2, vocab, dtype=dtype)
    target = torch.zeros(2, dtype=torch.int32 if strided else torch.int64)
    weight = torch.ones(vocab) if options.label_smoothing else None
    divisors = spec.divisors(target, weight, options, torch.float32)
    sums = (None, None) if weight is None else (weight.sum(), torch.ones(2))
    inputs = spec.RowInputs(target, options, divisors, weight, *sums)
    results = spec.RowResults.empty(2, logits, options, keep_lse=True)
    backend.rows(logits, inputs, results, logits)
    backend.rows(logits, inputs, results, None)
    backend.row_stats(logits, inputs)
    backend.row_grad(logits, inputs, torch.zeros(2, 2), torch.ones(2), logits)
    backend.scale_(logits, torch.ones(()))


def exchanged_launches_of(dtype: torch.dtype, vocab: int, options: CrossEntropyOptions, ranks: int, *, strided: bool) -> None:
    """Call the kernel that exchanges statistics on a rank's part of `vocab` classes, with and without gradient."""
    logits = torch.zeros(2, vocab * 2, dtype=dtype)[:, ::2] if strided else torch.zeros(2, vocab, dtype=dtype)
    target, weight = torch.zeros(2, dtype=torch.int64), torch.ones(2) if strided else None
    divisors = spec.divisors(target, None, options, torch.float32)
    inputs = spec.RowInputs(target, options, divisors, target_weight=weight, start=vocab, vocab=vocab * ranks)
    results = spec.RowResults.empty(2, logits, options, keep_lse=True)
    turn = Turn(torch.zeros(ranks, dtype=torch.int64), rank=1, capacity=8192, tag=2, timeout_s=600.0)
    for grad in (logits, None):
        backend.exchanged_rows(logits, inputs, results, grad, turn)


def projection_launches_of(dtype: torch.dtype, *, biased: bool) -> None:
    """Call the projection whose number of rows the device knows."""
    x, weight, logits = (torch.zeros(size, dtype=dtype) for size in ((384, 64), (520, 64), (384, 520)))
    backend.projection.project(x, torch.tensor(7), weight, torch.zeros(520, dtype=dtype) if biased else None, logits)


def source_of(function: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> ASTSource:
    """What Triton's own launcher would compile for these arguments."""
    signature, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        value = constants[name] if name in constants else args[i]
        varies = name in function.do_not_specialize
        if name in constants or value is None or (isinstance(value, int) and value == 1 and not varies):
            signature[name], constexprs[name] = "constexpr", value
        elif hasattr(value, "block_shape"):  # a tensor descriptor, which not every version of Triton has
            block = ",".join(map(str, value.block_shape))
            signature[name] = f"tensordesc<{POINTERS[value.base.dtype].removeprefix('*')}[{block}]>"
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            if name not in function.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not varies:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(function, signature, constexprs, attributes)


def main(backend_name: str, arch: str, warp_size: str) -> None:
    target = GPUTarget(backend_name, int(arch) if arch.isdigit() else arch, int(warp_size))
    backend.IS_HIP = backend_name == "hip"
    functions = {name: getattr(kernels, name) for name in KERNELS}
    launches: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for name in KERNELS:
        setattr(kernels, name, Recorder(name, launches))
    launches_of(torch.bfloat16, 32000, PLAIN, strided=False)
    launches_of(torch.bfloat16, 131072, EVERYTHING, strided=False)
    launches_of(torch.float16, 50257, EVERYTHING, strided=True)
    launches_of(torch.float32, 128256, PLAIN, strided=False)
    launches_of(torch.float32, 1, EVERYTHING, strided=True)
    if backend_name == "cuda":  # elsewhere it is never called
        exchanged_launches_of(torch.bfloat16, 64128, PLAIN, 2, strided=False)
        exchanged_launches_of(torch.float32, 16032, EXCHANGED, 8, strided=True)
    if arch in [f"{major}{minor}" for major, minor in ahead.ARCHS]:
        from liger.backends.triton import projection

        functions["projection_kernel"] = projection.projection_kernel
        projection.projection_kernel = Recorder("projection_kernel", launches)
        projection_launches_of(torch.bfloat16, biased=False)
        projection_launches_of(torch.float16, biased=True)
    for name, args, kwargs in launches:
        options = {option: kwargs.pop(option) for option in COMPILER_OPTIONS if option in kwargs}
        if "CLOCK" in kwargs:
            kwargs["CLOCK"] = True  # the tensors are on a CPU, which has none
        compiled = triton.compile(source_of(functions[name], args, kwargs), target=target, options=options)
        binary = compiled.asm["cubin" if backend_name == "cuda" else "hsaco"]
        if name == "exchanged_rows_kernel" and "atom.global.sys.relaxed.exch.b64" not in compiled.asm["ptx"]:
            raise SystemExit("no test on a CPU, and few on a GPU, would see that a peer may not see the words")
        print(f"{name} {len(binary)} bytes, {options['num_warps']} warps")


if __name__ == "__main__":
    main(*sys.argv[1:])
