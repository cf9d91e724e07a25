"""Breaks the package in known ways and asks the tests: `python test/mutants.py` (`--write` puts the table into the docs).

Every mutant is a text replacement in a temporary copy; the working tree is never touched. The tests run on the torch
backend, which executes `liger/spec.py`, and where it takes one that scales its saved gradient in place, on Triton's
interpreter; those of the CuTe DSL kernels run their source in Python. A mutant that survives is a hole in the suite, and
makes the exit status 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mutations.md"
SUBJECTS = ("spec", "num_items", "targets", "numerics", "autograd", "linear", "shapes")
WITHOUT_KERNELS = "not triton and not cutedsl and not mutant"
FIRST_FAILURE = re.compile(r"^FAILED test/(\S+)", re.MULTILINE)
BEGIN, END = "<!-- generated: mutants -->", "<!-- /generated -->"
SECONDS = 300


@dataclass(frozen=True)
class Mutant:
    """One way to break one file."""

    what: str
    file: str
    old: str
    new: str
    selected: str = WITHOUT_KERNELS
    """Which tests may kill it, as pytest's -k takes it."""
    subjects: tuple[str, ...] = SUBJECTS
    """The files they are in: test_<subject>.py, in the folder before the last slash if there is one."""

    def apply(self, source: str) -> str:
        """The broken source.

        Raises:
            ValueError: the text to replace is not there exactly once: the mutant has to follow the code.
        """
        if source.count(self.old) != 1:
            raise ValueError(f"mutant {self.what!r}: {self.file} has {source.count(self.old)} times: {self.old}")
        return source.replace(self.old, self.new)


TRITON = "triton-cpu and (A2 or in_place)"
SPEC, LINEAR, PLAN, AUTOGRAD = "liger/spec.py", "liger/backends/linear.py", "liger/backends/plan.py", "liger/autograd.py"
AHEAD, CONTEXT = "liger/backends/ahead.py", "liger/context.py"
CUTE = "liger/backends/cutedsl/kernels.py"
KERNELS, REGISTRY, CAPABILITY = "liger/backends/triton/kernels.py", "liger/dispatch/registry.py", "liger/dispatch/capability.py"
INTERPRETED = "triton-cpu and not mutant"

MATHEMATICS = (
    Mutant("drop the one-hot", SPEC, ".scatter_add_(1, index[:, None], torch.where(here, -b, 0)[:, None])", ""),
    Mutant(
        "double the scale",
        SPEC,
        "t = torch.where(in_range, t, torch.nan)",
        "t = torch.where(in_range, 2 * t, torch.nan)",
    ),
    Mutant(
        "divide by all rows",
        SPEC,
        "(target != options.ignore_index).sum(dtype=dtype)",
        "torch.ones_like(target).sum(dtype=dtype)",
    ),
    Mutant(
        "forget class weights in D",
        SPEC,
        "Divisors(mass.sum(dtype=dtype), ",
        "Divisors(valid.sum(dtype=dtype), ",
    ),
    Mutant(
        "use lse - s_y",
        SPEC,
        "nll = log_sum - stats.target_logit",
        "nll = (stats.maximum + log_sum) - (stats.maximum + stats.target_logit)",
    ),
    Mutant(
        "round the loss early",
        SPEC,
        "(rows if keep_rows else rows.sum()).to(loss_dtype)",
        "(rows if keep_rows else rows.to(loss_dtype).sum()).to(loss_dtype)",
    ),
    Mutant("drop the upstream gradient", SPEC, "t = t * grad_loss.to(t.dtype)", "t = t * torch.ones_like(t)"),
    Mutant(
        "let padding carry mass",
        SPEC,
        "shifted.exp_().sum(-1)",
        "shifted.exp_().sum(-1) + (-s.shape[1] % 128) * torch.exp(-maximum)",
    ),
    Mutant("scale ignored rows", SPEC, "return grad.masked_fill_(~valid[:, None], 0)", "return grad"),
    Mutant("forget the scale in the gradient", SPEC, "t = t * options.logit_scale", "pass"),
    Mutant("divide by the rows, not the items", SPEC, "return Divisors(items, items)", "pass"),
    Mutant("skip the softcap derivative", SPEC, "grad *= 1 - (s / options.softcap) ** 2", "grad *= 1"),
)

AROUND_IT = (
    Mutant("divide the z-loss by D", SPEC, "else _inverse(divisors.z))", "else core)"),
    Mutant("smooth without class weights", SPEC, "shifted.sum(-1) if w is None else (shifted * w).sum(-1)", "shifted.sum(-1)"),
    Mutant("predict for ignored rows", SPEC, "torch.where(valid, stats.argmax, -1)", "stats.argmax"),
    Mutant(
        "let a wrong target read class 0",
        SPEC,
        "torch.where(in_range, shifted.gather(1, index[:, None])[:, 0], torch.nan)",
        "shifted.gather(1, index[:, None])[:, 0]",
    ),
    Mutant("accept target V", "liger/checks.py", "(target >= vocab))", "(target > vocab))"),
    Mutant("ignore grad mode", "liger/run.py", "on = torch.is_grad_enabled()", "on = True"),
    Mutant("hand out what is saved", AUTOGRAD, "    if retained:\n        saved = _copies(saved)\n", ""),
    Mutant("allow a second derivative", AUTOGRAD, "if torch.is_grad_enabled():", "if False:"),
    Mutant("keep only the last chunk", LINEAR, "first=not self.started)", "first=True)"),
    Mutant("never skip a row", LINEAR, "if not plan.skips(count):", "if True:"),
    Mutant("take other rows for the first", LINEAR, "index is not None or last == ahead - 1", "True"),
    Mutant("lose what was projected ahead", LINEAR, "slab[: self.ahead] = self.slab[: self.ahead]", "pass"),
    Mutant("project again what is done", LINEAR, "if ahead and not self.begun:", "if ahead:"),
    Mutant("project most of a chunk ahead", AHEAD, "rows <= plan.chunk_rows // 2 and", "", subjects=("linear",)),
    Mutant("any head for the kernel", AHEAD, "stride == 1 and", "", subjects=("linear",)),
    Mutant(
        "forget to scatter",
        LINEAR,
        "self.input.index_copy_(0, self.index[span], rows.to(self.input.dtype))",
        "self.input[span] = rows",
    ),
    Mutant("sum many chunks in bf16", PLAN, "and chunks <= FEW_CHUNKS", ""),
    # What only a backend that scales its saved gradient in place, or writes into the logits, can show.
    Mutant("scale a saved gradient twice", AUTOGRAD, "ctx.first_factor = grad_loss.detach().clone()", "", TRITON),
    Mutant("let autograd add to what is saved", AUTOGRAD, "return _copies(saved)", "return saved", TRITON),
    Mutant("reuse logits that hold a gradient", AUTOGRAD, "ctx.recipe.options.in_place and ctx.used", "False", TRITON),
    Mutant(
        "overwrite logits unseen",
        "liger/backends/logits.py",
        "torch.autograd.graph.increment_version(call.input)",
        "pass",
        TRITON,
    ),
)


def kernel(what: str, old: str, new: str, *subjects: str) -> Mutant:
    """A mutant of Triton's kernels, which the interpreter runs."""
    return Mutant(what, KERNELS, old, new, INTERPRETED, subjects or ("targets", "spec", "numerics"))


def choice(what: str, file: str, old: str, new: str) -> Mutant:
    """A mutant of the dispatcher."""
    return Mutant(what, file, old, new, "not mutant", ("dispatch",))


TRITON_KERNELS = (
    kernel("kernel: let padding carry mass", 'tl.where(offsets < vocab, s, -float("inf"))', "s + 0", "numerics"),
    kernel(
        "kernel: do not rescale sums",
        "sums * tl.exp2((maxima - larger) * LOG2_E) + ",
        "sums + ",
        "shapes",
        "numerics",
    ),
    kernel("kernel: do not rescale lanes", "tl.sum(sums * tl.exp2((maxima - maximum) * LOG2_E), 0)", "tl.sum(sums, 0)"),
    kernel("kernel: smooth over padding", "tl.where(tl.reshape(there, (BLOCK // WIDTH, WIDTH)), terms, 0.0)", "terms + 0.0"),
    kernel(
        "kernel: smooth without class weights",
        "w = tl.load(class_weight_ptr + offsets, mask=there, other=0.0)",
        "w = tl.where(there, 1.0, 0.0)",
    ),
    kernel(
        "kernel: predict the next class",
        "tl.where(s == maximum, offsets, vocab)",
        "tl.where(s == maximum, offsets + 1, vocab)",
    ),
    kernel("kernel: divide by 0", "tl.where(divisor != 0.0, 1.0 / divisor, 0.0)", "1.0 / divisor"),
    kernel("kernel: forget the target's weight", "b *= tl.load(target_weight_ptr + row)", "b *= 1.0"),
    kernel("kernel: smooth by e, not e / V", "d = core * label_smoothing / vocab", "d = core * label_smoothing"),
    kernel("kernel: forget smoothing's mass", "a = b + d * weight_sum + t", "a = b + t"),
    kernel("kernel: halve the z gradient", "* 2.0 * lse_square_scale * (maximum", "* lse_square_scale * (maximum"),
    kernel("kernel: drop the one-hot", "g = tl.where(offsets == y, g - b, g)", "g = g + 0.0"),
    kernel("kernel: a wrong softcap derivative", "g *= 1.0 - ratio * ratio", "g *= 1.0 - ratio"),
    kernel(
        "kernel: no smoothing in the gradient",
        "        else:\n            g -= d\n",
        "        else:\n            g -= 0.0\n",
    ),
    kernel("kernel: a loss for ignored rows", "tl.store(loss_ptr + row, 0.0)", "tl.store(loss_ptr + row, 1.0)"),
    kernel(
        "kernel: predict 0 for ignored rows",
        "tl.store(predicted_ptr + row, -1)",
        "tl.store(predicted_ptr + row, 0)",
    ),
    kernel(
        "kernel: leave ignored rows as they were",
        "    if grad_row_ptr is not None:\n        _write_zeros(grad_row_ptr, grad_stride, vocab, GRAD_STRIDED, BLOCK)\n",
        "",
        "targets",
        "autograd",
    ),
    kernel(
        "kernel: accept target V",
        "in_range = (y >= 0) & (y < vocab)\n    y = tl",
        "in_range = (y >= 0) & (y <= vocab)\n    y = tl",
    ),
    kernel(
        "kernel: a number for a wrong target",
        't = tl.where(in_range, 1.0, float("nan"))',
        "t = tl.where(in_range, 1.0, 1.0)",
    ),
    kernel("kernel: scale tokens by 2 ** -nll", "tl.exp2(-nll * LOG2_E)", "tl.exp2(-nll)"),
    kernel(
        "kernel: use lse - s_y",
        "nll = log_sum - (target_logit - maximum)",
        "nll = (log_sum + maximum) - target_logit",
    ),
    kernel("kernel: sum smoothing around old maxima", "weights == 0.0, 0.0, weights * shift", "weights == 0.0, 0.0, 0.0"),
    kernel("kernel: forget the z-loss", "tl.store(loss_ptr + row, loss + z)", "tl.store(loss_ptr + row, loss)"),
    kernel(
        "kernel: keep lse, not log sum",
        "tl.store(lse_ptr + lse_stride + row, log_sum)",
        "tl.store(lse_ptr + lse_stride + row, lse)",
        "autograd",
    ),
    kernel(
        "kernel: forget the scale in the gradient",
        "a, b, d = a * logit_scale, b * logit_scale, d * logit_scale",
        "pass",
    ),
    kernel(
        "kernel: the first upstream gradient for all",
        "tl.load(grad_loss_ptr + row * grad_loss_stride).to(tl.float32)",
        "tl.load(grad_loss_ptr).to(tl.float32)",
        "autograd",
    ),
    kernel("kernel: forget the scale in backward", "        t *= logit_scale\n", "        t *= 1.0\n"),
    kernel("kernel: scale by nothing", "x.to(tl.float32) * factor", "x.to(tl.float32)", "autograd"),
    kernel(
        "kernel: leave the last row unscaled",
        "rows, tl.num_programs(0)",
        "rows - 1, tl.num_programs(0)",
        "autograd",
    ),
)

CUTE_KERNELS = tuple(
    Mutant(f"CuTe DSL: {what}", CUTE, old, new, "not mutant", ("cutedsl/interpreted",))
    for what, old, new in (
        ("add sums of different maxima", "their_sum * rebased(base_of(their_m)[1], higher)", "their_sum"),
        ("forget that the maximum rose", "sum_exp = sum_exp * rebased(base, higher) + tree", "sum_exp = sum_exp + tree"),
        ("forget what the base was rounded by", "        sum_exp = sum_exp * exp2(-residue(m))\n", ""),
        ("forget it in the gradient", "exp2(-(log_sum * LOG2_E + residue(m)))", "exp2(-(log_sum * LOG2_E))"),
        ("let log2 e overflow", "cutlass.select_(arch.fmax(m, -m) < HUGE, Float32(LOG2_E), Float32(1.0))", "Float32(LOG2_E)"),
        ("rise between the factors", "cutlass.select_(shift > 0.0, Float32(-math.inf), shift)", "shift"),
        ("hand over the target's coefficients for all", "made_from._replace(b=Float32(0.0))", "made_from"),
        ("take what lies behind a slice", "cutlass.select_(vector < p.vectors, s, Float32(-math.inf))", "s"),
        ("swap the halves of a word", "(words[i] << 16, words[i] & -65536)", "(words[i] & -65536, words[i] << 16)"),
        ("no one-hot", "        if mine:\n            weights", "        if False:\n            weights"),
        (
            "look for the target in every block's slice",
            "Int32(cutlass.select_(here, column, Int64(-1))) - p.start",
            "Int32(column)",
        ),
        ("another row's target at known statistics", "place = Int64(row) * a.logits_stride", "place = Int64(0)"),
        ("the greatest index of a tie", "(their_best < best)", "(their_best > best)"),
        ("forget the slope of the soft cap", "[g * (1.0 - ratio * ratio) for", "[g for"),
        ("smooth all classes alike", "[g - d * w for g, w in", "[g - d for g, w in"),
        ("read a long row's start again for its end", "start = position + p.pieces * (self.reads - 1)", "start = position"),
        ("leave ignored rows as they were", "                    self._write_zeros(a, p, row)", "                    pass"),
        ("leave what no whole vector holds unscaled", "        if index < a.size:", "        if index < 0:"),
        (
            "free a piece before it is read",
            "        scores = self._read(a, p, slot, cap)\n        self._release(p, slot)\n",
            "        self._release(p, slot)\n        scores = self._read(a, p, slot, cap)\n",
        ),
        (
            "refill a slot that is still read",
            "arch.mbarrier_wait(p.empty + slot, (position // layout.slots + 1) & 1)",
            "pass",
        ),
        (
            "read a piece that has not come",
            "        arch.mbarrier_wait(p.full + slot, ((position + piece) // layout.slots) & 1)\n",
            "",
        ),
        ("exchange through one buffer", "buffer = p.entries + (exchanges & 1) *", "buffer = p.entries + 0 *"),
        ("use statistics that have not come", "        arch.mbarrier_wait(barrier, (exchanges >> 1) & 1)\n", ""),
        (
            "write a gradient before it is known",
            "                arch.mbarrier_wait(p.known + entry, (count // self.layout.slots) & 1)\n",
            "",
        ),
    )
)

CHOICES = (
    choice(
        "let the variable beat the argument",
        REGISTRY,
        "if backend is not None and backend not in AUTO:",
        "if backend is not None and backend not in AUTO and not os.environ.get(ENVIRONMENT_VARIABLE):",
    ),
    choice("fall back from a named backend", REGISTRY, 'if name in ("auto", row.backend)', "if name"),
    choice(
        "remember across the variable",
        REGISTRY,
        "key = (request, backend, os.environ.get(ENVIRONMENT_VARIABLE),",
        "key = (request, backend,",
    ),
    choice("admit every option", CAPABILITY, "if name not in self.options]", "if not name]"),
    choice("admit every later version", CAPABILITY, "<= release(version) < self.below", "<= release(version)"),
    choice(
        "admit every later architecture",
        CAPABILITY,
        "device.capability not in self.archs",
        "(device.capability or (0, 0)) < min(self.archs)",
    ),
    choice(
        "lose what a rule raised",
        CAPABILITY,
        'return f"its rule raised {type(error).__name__}: {error}"',
        "return None",
    ),
    choice("admit every dtype", CAPABILITY, "if request.dtype not in self.dtypes:", "if not self.dtypes:"),
)

LOOP = (
    Mutant("skip whatever is ignored", PLAN, "max(1, self.rows * SKIP_FRACTION)", "1"),
    Mutant(
        "drop a chunk's last row",
        PLAN,
        "yield slice(start, start + size)",
        "yield slice(start, start + size - 1)",
    ),
    Mutant("one chunk for all", PLAN, "size = min(left, self.chunk_rows)", "size = left"),
    Mutant(
        "leave skipped rows as they were",
        LINEAR,
        "new_input = x.new_empty if index is None else x.new_zeros",
        "new_input = x.new_empty",
    ),
    Mutant(
        "the bias of the last chunk",
        LINEAR,
        "self.bias[: self.classes] += chunk.logits",
        "self.bias[: self.classes] = chunk.logits",
    ),
    Mutant(
        "no zeros where nothing is labelled",
        LINEAR,
        "self.weight[self.classes if self.started else 0 :] = 0",
        "pass",
    ),
    Mutant(
        "upstream gradients of other rows",
        LINEAR,
        "lse[:, index], grad_loss[index]",
        "lse[:, index], grad_loss[: len(index)]",
    ),
    Mutant("underflow in float16", "liger/call.py", " or logits_dtype == torch.float16", ""),
    Mutant(
        "read what a collective has not brought", CONTEXT, "if wait is not None", "if False", INTERPRETED, ("sharded_heads",)
    ),
    Mutant(
        "read negatives", CONTEXT, "tensor.resolve_neg() if tensor.is_neg() else tensor", "tensor", INTERPRETED, ("shapes",)
    ),
    Mutant(
        "count another dtype's bytes", PLAN, "hidden * input_dtype.itemsize", "hidden * dtype.itemsize", subjects=("memory",)
    ),
    Mutant("read negatives in backward", AUTOGRAD, "grad_loss = holding(grad_loss)", "pass", INTERPRETED, ("shapes",)),
    Mutant("project again with another head", AUTOGRAD, "and call.weight.shape != shape", "and False", subjects=("autograd",)),
    Mutant(
        "compare an int32 modulo its range",
        "liger/checks.py",
        "if tensor.dtype == torch.int32 and not",
        "if False and not",
        "not mutant",
        ("bad_input",),
    ),
    Mutant(
        "import what is broken for every shape",
        REGISTRY,
        "if self.module not in _failed:",
        "if True:",
        "not mutant",
        ("dispatch",),
    ),
    Mutant("take sizes for values", CONTEXT, " or isinstance(tensor, FakeTensor)", "", "not mutant", ("graphs",)),
    Mutant(
        "smooth by more than 1",
        "liger/options.py",
        "0 <= smoothing <= 1",
        "0 <= smoothing",
        "not mutant",
        ("bad_input", "modules"),
    ),
)
SPLIT, PARTS = "liger/backends/split.py", "liger/vocab_parallel.py"
SPLIT_VOCABULARY = tuple(
    Mutant(*broken, selected="not triton", subjects=("vocab_parallel", "sharded_heads"))
    for broken in (
        ("number each rank's classes from 0", SPLIT, "(stats.argmax + inputs.start)", "stats.argmax"),
        ("leave what padding held", SPLIT, "        grad[:, classes:] = 0\n\n", "\n"),
        ("scale by no rank's probability", SPLIT, "* lse[2].exp()", "* 1"),
        ("give ties to the highest id", SPEC, "torch.iinfo(torch.int64).max).amin(0)", "-1).amax(0)"),
        ("forget how far a rank is below", SPEC, "(self.target_logit + shift)", "self.target_logit"),
        ("smooth relative to each rank's maximum", SPEC, "(self.weighted_sum + moved).sum(0)", "self.weighted_sum.sum(0)"),
        ("subtract a one-hot on every rank", SPEC, "torch.where(here, -b, 0)[:, None]", "-b[:, None]"),
        ("smooth over a rank's part", "liger/call.py", "vocab=split.vocab_size)", "vocab=split.classes or 1)"),
        ("keep a rank's part of dx", PARTS, "work = dist.all_reduce(total,", "work = dist.all_reduce(total.clone(),"),
        ("plan by a rank's part", PLAN, "make_plan(\n        _shape(call),", "make_plan((call.rows, *weight.shape),"),
        ("gather tokens twice", PARTS, "return self.gather(tensor).view", "return self.gather(self.gather(tensor)[0]).view"),
        ("sum FSDP's gradients", "liger/integrations/fsdp.py", "gradient / ranks)", "gradient)"),
    )
)
EXCHANGE = tuple(
    Mutant(f"exchange: {what}", file, old, new, INTERPRETED, ("exchange",))
    for what, file, old, new in (
        ("one half of the buffers for all calls", KERNELS, "(tag & 1) * RANKS", "(tag & 0) * RANKS"),
        (
            "take any call's words",
            KERNELS,
            "((first >> 32) == tag) & ((second >> 32) == tag) & ((third >> 32) == tag)",
            "(first != 0) & (second != 0) & (third != 0)",
        ),
        (
            "add sums of different maxima",
            KERNELS,
            "tl.fma(_number(second), tl.exp2((m - larger) * LOG2_E), scaled)",
            "_number(second) + sum_exp",
        ),
        ("send the target's logit for the sum", KERNELS, "tl.where(place == 1, sum_exp, target_logit)", "target_logit"),
        (
            "the target's logit of the last rank",
            KERNELS,
            "tl.where(target_logit == target_logit, target_logit, _number(third))",
            "_number(third)",
        ),
        (
            "number each rank's classes from 0",
            KERNELS,
            "y - start, logit_scale, softcap, None,\n",
            "y, logit_scale, softcap, None,\n",
        ),
        ("finish a row without those who are late", KERNELS, "    assert complete,", "    assert True,"),
        ("a tag twice in one buffer", "liger/exchange.py", " or self.tag == LAST_TAG", ""),
        ("smooth without the sums for it", SPLIT, "not (options.label_smoothing or ", "not ("),
        ("wait for a rank without classes", SPLIT, " or self.split.has_empty_part", ""),
    )
)
ENDURANCE = (
    *(
        Mutant(*broken, subjects=("memory",))
        for broken in (
            ("keep what a failed run allocated", PLAN, "failure.__traceback__ = None", "pass"),
            ("try plans that need more", PLAN, "if _needed(call, found, gradients) <", "if 0 <"),
            ("take fewer rows than the caller asked for", PLAN, "call.options.chunk_size is not None or agreed", "agreed"),
            ("let each rank choose its chunks", PLAN, "split is not None and split.ranks > 1", "False"),
            ("say less than is needed", PLAN, "kept = self.input_bytes * input + ", "kept = "),
            ("keep the logits", LINEAR, "self.begun = False\n", "self.begun = False; vars(plan_for).update(last=self)\n"),
            ("begin with two slabs always", LINEAR, "(plan.slab_bytes // plan.chunk_rows) <= gradients", "0 <= gradients"),
        )
    ),
    Mutant("smooth all rows in one product", SPEC, "(shifted * w).sum(-1)", "shifted @ w", subjects=("isolation",)),
)
MUTANTS = MATHEMATICS + AROUND_IT + TRITON_KERNELS + CUTE_KERNELS + CHOICES + LOOP + SPLIT_VOCABULARY + EXCHANGE + ENDURANCE


@dataclass(frozen=True)
class Verdict:
    """What the tests said."""

    mutant: Mutant
    killer: str | None
    """The first test that failed; None: it survived."""


def tested(copy: Path, selected: str, subjects: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The selected tests, up to the first failure, on the package in a copy of the tree."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-k", selected]
    paths = (Path("test", subject) for subject in subjects)
    tests = [str(path.with_name(f"test_{path.name}.py")) for path in paths]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)


def copied(to: Path) -> Path:
    """A copy of the package and its tests."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("liger", "test"):
        shutil.copytree(ROOT / name, to / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", to)
    return to


def judged(mutant: Mutant | None) -> Verdict | None:
    """The verdict on a mutant; on None, nothing, after the tests have passed on the copy that no mutant has touched.

    Raises:
        RuntimeError: the tests could not run, or fail without a mutant.
    """
    with tempfile.TemporaryDirectory(prefix="liger-mutant-") as folder:
        copy = copied(Path(folder))
        if mutant is not None:
            path = copy / mutant.file
            path.write_text(mutant.apply(path.read_text("utf-8")), "utf-8")
        try:
            run = tested(copy, *((WITHOUT_KERNELS, SUBJECTS) if mutant is None else (mutant.selected, mutant.subjects)))
        except subprocess.TimeoutExpired:
            return Verdict(mutant, f"all of them, by running for more than {SECONDS} s") if mutant else None
    failure = FIRST_FAILURE.search(run.stdout)
    if mutant is None:
        if run.returncode != 0:
            raise RuntimeError(f"the tests fail without any mutant:\n{run.stdout}{run.stderr}")
        return None
    if run.returncode == 0:
        return Verdict(mutant, None)
    if run.returncode != 1 or failure is None:
        raise RuntimeError(f"mutant {mutant.what!r} broke the run, not a test:\n{run.stdout}{run.stderr}")
    return Verdict(mutant, failure.group(1))


def table(verdicts: list[Verdict], before: str = "") -> str:
    """The verdicts in Markdown; of mutants without one, the lines of the table `before`."""
    lines = {_cells(mutant): line for line in before.splitlines() for mutant in MUTANTS if line.startswith(_cells(mutant))}
    for verdict in verdicts:
        killer = "" if verdict.killer is None else f"`{verdict.killer}`"
        word = "survived" if verdict.killer is None else "killed"
        lines[_cells(verdict.mutant)] = f"{_cells(verdict.mutant)} {word} | {killer} |"
    shown = [lines[_cells(mutant)] for mutant in MUTANTS if _cells(mutant) in lines]
    return "\n".join(["| mutant | file | verdict | first test that fails |", "| --- | --- | --- | --- |", *shown])


def _cells(mutant: Mutant) -> str:
    return f"| {mutant.what} | `{mutant.file}` |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/mutations.md")
    parser.add_argument("--jobs", type=int, default=2, help="test runs at a time (2)")
    parser.add_argument("names", nargs="*", help="only mutants whose description contains one of these")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.names or any(name in m.what for name in arguments.names)]
    for mutant in chosen:  # before the first minute is spent
        mutant.apply((ROOT / mutant.file).read_text("utf-8"))
    judged(None)
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for verdict in pool.map(judged, chosen):
            if verdict is not None:
                verdicts.append(verdict)
                print(f"{'survived' if verdict.killer is None else 'killed':9}{verdict.mutant.what}: {verdict.killer}")
    survivors = [verdict for verdict in verdicts if verdict.killer is None]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants killed")
    if arguments.write:
        before, rest = PAGE.read_text("utf-8").split(BEGIN)
        old, after = rest.split(END)
        PAGE.write_text(f"{before}{BEGIN}\n{table(verdicts, old)}\n{END}{after}", "utf-8")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
