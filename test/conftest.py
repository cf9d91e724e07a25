"""A test with an argument `ce`, `flce` or `loss` (either op) runs on every implementation in the table and device.

The argument is a `Subject`: a row of the table together with a device. Those on "cuda" carry the mark `gpu`. What
cannot run here is skipped with the row's own reasons. Without a GPU, Triton's kernels run in its interpreter, which is
slow: `Subject.interpreted` is there for tests to choose smaller sizes.
"""

import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass

import hypothesis
import pytest
import torch
from recipes import pytest_addoption, pytest_configure  # noqa: F401 - pytest finds its hooks here

# Before anything imports triton: its kernels read this when they are defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from ranks import World

import liger
from liger.dispatch import OPS, Implementation, Request, device_info, table
from liger.options import CrossEntropyOptions
from liger.testing import Expected, Inputs, Outcome, assert_matches, collect, make_inputs, reference, yardstick

DEVICES = ("cpu", "cuda")
HALF = (torch.float16, torch.bfloat16)


def spare_the_interpreter_repeated_work():
    """Halves the time of every interpreted test.

    Triton's interpreter replaces the functions of `triton.language` by its own when a kernel is launched, and again, to no
    effect, whenever one device function calls another. Only triton's own library functions, which see another module,
    need that once.
    """
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language
    from triton.runtime import interpreter

    patch, core, patched = getattr(interpreter, "_patch_lang", None), triton.language.core, []

    def call(self, *args, **kwargs):
        if not patched and core in [value for value in self.fn.__globals__.values() if inspect.ismodule(value)]:
            patched.append(patch(self.fn))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    if patch is not None:
        interpreter.InterpretedFunction.__call__ = call


if os.environ.get("TRITON_INTERPRET") == "1":
    spare_the_interpreter_repeated_work()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers already fill the cores

# The same examples on every run; `--hypothesis-profile explore` looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=50)
hypothesis.settings.register_profile("explore", deadline=None, database=None, max_examples=2000)
hypothesis.settings.load_profile("repeatable")


@dataclass(frozen=True, repr=False)
class Subject:
    """One implementation on one device."""

    row: Implementation
    device: str

    @property
    def fused(self) -> bool:
        return self.row.op == "fused_linear_cross_entropy"

    @property
    def interpreted(self) -> bool:
        return self.device == "cpu" and self.row.capability.interpreter is not None

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Admitted dtypes, most precise first."""
        return sorted(self.row.capability.dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def finest(self) -> torch.dtype:
        return self.dtypes[0]

    def few(self, sizes, count=1):
        """All sizes; only the first `count` in the interpreter."""
        return sizes[:count] if self.interpreted else sizes

    def rounding(self, dtype: torch.dtype) -> float:
        """Relative error of one rounding to a dtype, with a thousandth to spare for the arithmetic before it."""
        truncated = self.interpreted and dtype == torch.bfloat16  # what Triton's interpreter does to bf16
        return torch.finfo(dtype).eps * (1 if truncated else 0.5) * 1.001

    def reasons(self, dtype: torch.dtype | None = None, **options: object) -> tuple[str, ...]:
        """The row's reasons against a small call; options by name, tensors as True."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return ("no CUDA device here",)
        return self.row.reasons(self.request(dtype, 16, **options))

    def request(self, dtype: torch.dtype | None, vocab: int, **options: object) -> Request:
        """A small call, described; options by name, tensors as True."""
        shape = (8, vocab, 4) if self.fused else (8, vocab)
        return Request(
            self.row.op, device_info(torch.device(self.device)), dtype or torch.float32, shape, tuple(options.items())
        )

    def rule_against(self, request: Request) -> str | None:
        """The reason of the row's rule against a call."""
        rule = self.row.capability.rule
        return None if rule is None else rule(request)

    def needs(self, dtype: torch.dtype | None = None, **options: object) -> None:
        """Skip the test, saying why, where the row refuses these."""
        if reasons := self.reasons(dtype, **options):
            pytest.skip(f"{self}: {'; '.join(reasons)}")

    def inputs(self, rows: int, vocab: int, hidden: int = 16, **kwargs) -> Inputs:
        """Random tensors for this op, on this device, of the smallest vocabulary from `vocab` on that the row's rule admits."""
        wanted = range(vocab, vocab + 16)
        vocab = next((size for size in wanted if self.rule_against(self.request(kwargs.get("dtype"), size)) is None), vocab)
        return make_inputs(rows, vocab, hidden if self.fused else None, device=self.device, **kwargs)

    def tensors(self, input, target, weight=None, bias=None, class_weight=None) -> Inputs:
        """The given tensors, moved to this device."""
        given = (input, target, weight, bias, class_weight)
        return Inputs(*(None if t is None else t.to(self.device) for t in given))

    def __call__(self, inputs: Inputs, **options):
        """The loss through the public function, on this row's backend; the test ends here if its rule refuses the call."""
        options = {"backend": self.row.backend, "num_items": inputs.num_items} | options
        try:
            if self.fused:
                return liger.liger_fused_linear_cross_entropy(
                    inputs.input, inputs.weight, inputs.target, inputs.bias, inputs.class_weight, **options
                )
            return liger.liger_cross_entropy(inputs.input, inputs.target, inputs.class_weight, **options)
        except liger.UnsupportedError as refused:
            reason = self.rule_against(refused.request)
            if reason is None:
                raise
        pytest.skip(f"{self}: {reason}")

    def outcome(self, inputs: Inputs, *, upstream=None, frozen=(), **options) -> Outcome:
        """Loss and gradients, of fresh leaves with the values of `inputs`."""
        leaves = inputs.leaves(*frozen)
        return collect(self(leaves, **options), leaves, upstream)

    def expected(self, inputs: Inputs, *, upstream=None, **options) -> tuple[Expected, Expected]:
        """(reference, yardstick) of a call."""
        checked = CrossEntropyOptions(**options)
        # A CPU's products are made in float32 whatever the dtype; a GPU's in half precision round what they touch.
        half = self.fused and self.device != "cpu" and inputs.input.dtype in HALF
        gemm_dtype = inputs.input.dtype if half else None
        return (
            reference(inputs, checked, upstream),
            yardstick(inputs, checked, upstream, gemm_dtype=gemm_dtype),
        )

    def check(self, inputs: Inputs, *, upstream=None, frozen=(), **options) -> Outcome:
        """The outcome, after it was found within budget of the oracle's."""
        got = self.outcome(inputs, upstream=upstream, frozen=frozen, **options)
        assert_matches(got, *self.expected(inputs, upstream=upstream, **options))
        ignored = inputs.target.flatten() == options.get("ignore_index", -100)
        if got.input is not None:
            rows = got.input.reshape(-1, got.input.shape[-1])
            assert not rows[ignored].any(), "an ignored row has a gradient"
        return got

    def __repr__(self) -> str:
        return f"{'flce' if self.fused else 'ce'}-{self.row.backend}-{self.device}"


ARGUMENTS = {"ce": OPS[:1], "flce": OPS[1:], "loss": OPS}


def pytest_generate_tests(metafunc):
    for argument, ops in ARGUMENTS.items():
        if argument in metafunc.fixturenames:
            subjects = [Subject(row, device) for op in ops for row in table(op) for device in DEVICES]
            marks = {"cpu": (), "cuda": pytest.mark.gpu}
            metafunc.parametrize(
                argument, [pytest.param(subject, id=str(subject), marks=marks[subject.device]) for subject in subjects]
            )


def pytest_runtest_setup(item):
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    for subject in parameters:
        if isinstance(subject, Subject):
            subject.needs()


GROUPS = {
    "two": ([2, 3], 60),  # of a 2 x 2 mesh, so that a rank of the group is not its global rank
    "three": ([1, 2, 3], 60),
    "fragile": ([0, 1], 3),
}
"""name -> (global ranks, seconds after which a collective gives up)"""


@pytest.fixture(scope="session")
def world():
    """Four processes that talk over gloo."""
    made = World(4, GROUPS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def gpus():
    """A process on each of two GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    made = World(2, {"two": ([0, 1], 60)}, "cuda")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch):
    monkeypatch.delenv("LIGER_BACKEND", raising=False)


@pytest.fixture(autouse=True)
def _no_accelerator_of_another_test():
    """What the first one in a process was asked for, its precision say, all later ones would have to ask for too."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
