"""TRL's per-token functions and this package's say the same, and the trainers find ours once they are installed."""

import contextlib
import dataclasses
import importlib
import importlib.util

import pytest
import torch

pytest.importorskip("trl", reason="the trl extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

import tiny_models  # noqa: E402
import trl  # noqa: E402
from trl.trainer import utils  # noqa: E402

from liger.backends import linear  # noqa: E402
from liger.backends import torch as torch_rows  # noqa: E402
from liger.integrations import trl as ours  # noqa: E402
from liger.testing import assert_within_budget  # noqa: E402

TheirFunction, their_selective = utils._ChunkedLogProbFunction, utils.selective_log_softmax
ROWS, VOCAB, HIDDEN = 9, 37, 8
NO_TRITON = importlib.util.find_spec("triton") is None
TRITON = pytest.param("triton", marks=pytest.mark.skipif(NO_TRITON, reason="the triton extra is not installed"))


@pytest.fixture(autouse=True)
def _on_torch(monkeypatch):
    monkeypatch.setenv("LIGER_BACKEND", "torch")


def leaves(dtype=torch.float32, *, bias=True, frozen=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (ROWS, HIDDEN), "weight": (VOCAB, HIDDEN), "bias": (VOCAB,) if bias else None}
    made = {
        name: None if shape is None else torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(name not in frozen)
        for name, shape in shapes.items()
    }
    target = torch.randint(VOCAB, (ROWS,), generator=generator)
    upstream = torch.randn(2, ROWS, generator=generator, dtype=dtype)
    return made, target, upstream


def truth(made, target, *, temperature, cap, scale):
    """Dense, in the leaves' dtype: (log-probability, entropy, log of the sum of squares, mean, top-1)."""
    logits = torch.nn.functional.linear(made["hidden"], made["weight"], made["bias"]) * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits / temperature
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, target[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    squares = torch.logsumexp(2 * log_p, -1)
    return picked, entropy, squares, logits.mean(-1), logits.argmax(-1) == target


def outcome(found, made, upstream):
    """[results, then gradients of what requires one] with both differentiable results pulled."""
    total = sum((part * pull.to(part.dtype)).sum() for part, pull in zip(found[:2], upstream, strict=True) if part is not None)
    total.backward()
    return [*found, *(None if leaf is None else leaf.grad for leaf in made.values())]


@pytest.mark.parametrize(
    "outputs",
    [("log_probs",), ("log_probs", "is_top1"), ("entropy",), ours.OUTPUTS, ("log_sum_sq_probs", "mean_logits")],
    ids="+".join,
)
@pytest.mark.parametrize(("temperature", "cap", "scale"), [(1.0, None, 1.0), (0.7, 3.0, 0.5), (2.0, None, 4.0)])
@pytest.mark.parametrize("function", ["torch", TRITON, "theirs"])
def test_every_result_and_gradient(function, outputs, temperature, cap, scale, monkeypatch):
    """Against float64, on each backend; TRL's own function stands the same test."""
    if function != "theirs":
        monkeypatch.setenv("LIGER_BACKEND", function)
    call = TheirFunction if function == "theirs" else ours.ChunkedLogProb
    options = {"temperature": temperature, "cap": cap, "scale": scale}
    made, target, upstream = leaves()
    chunk = 16 if function == "theirs" else max(1, 2 * VOCAB // ours.TILE_TOKENS)
    found = outcome(call.apply(*made.values(), target, temperature, chunk, cap, scale, outputs), made, upstream)
    results = []
    for dtype in (torch.float64, torch.float32):
        copies = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in made.items()}
        dense = truth(copies, target, **options)
        kept = [dense[0], *(part if name in outputs else None for name, part in zip(ours.OUTPUTS, dense[1:], strict=True))]
        results.append(outcome(kept, copies, upstream.to(dtype)))
    for got, exact, own in zip(found, *results, strict=True):
        assert (got is None) == (exact is None)
        if got is None:
            continue
        if got.dtype == torch.bool:
            assert torch.equal(got, exact)
        else:
            assert got.dtype == torch.float32
            # Sums of a few dozen products on the way, in another order than torch's.
            assert_within_budget(got, exact.detach(), own.detach(), torch.float32)


@pytest.mark.parametrize("frozen", [("hidden",), ("weight", "bias"), ("hidden", "weight", "bias")])
@pytest.mark.parametrize("outputs", [("log_probs",), ours.OUTPUTS], ids=["plain", "all"])
def test_what_is_frozen_has_no_gradient(frozen, outputs):
    made, target, upstream = leaves(frozen=frozen)
    found = ours.ChunkedLogProb.apply(*made.values(), target, 1.0, 8, None, 1.0, outputs)
    assert found[0].requires_grad == (len(frozen) < 3)
    if found[0].requires_grad:
        outcome(found, made, upstream)
        assert {name for name, leaf in made.items() if leaf.grad is None} == set(frozen)
    assert not any(part.requires_grad for part in found[2:] if part is not None)


@pytest.mark.parametrize("pulled", [0, 1])
def test_one_of_the_two_gradients_alone(pulled):
    gradients = []
    for call in (ours.ChunkedLogProb, TheirFunction):
        made, target, _ = leaves()
        call.apply(*made.values(), target, 1.0, 8)[pulled].sum().backward()
        gradients.append([leaf.grad for leaf in made.values()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_statistics_change_no_bit_of_the_log_probabilities(monkeypatch):
    """Nor of their gradient: the same rows take the same product, that of rows which are projected ahead among them."""

    def rounded(x, count, weight, bias, logits):
        logits.copy_((x @ weight.t() + bias).bfloat16())

    monkeypatch.setattr(linear, "rows_ahead", lambda weight, plan, kernels: 4 if kernels is torch_rows else 0)
    monkeypatch.setattr(linear, "project_ahead", rounded)
    made, target, upstream = leaves()
    results = []
    for outputs in (("log_probs",), ours.OUTPUTS):
        found = ours.ChunkedLogProb.apply(*made.values(), target, 1.0, 8, None, 1.0, outputs)[0]
        results.append([found, *torch.autograd.grad(found, list(made.values()), upstream[0])])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_masked_classes_carry_no_entropy():
    made, target, _ = leaves()
    with torch.no_grad():
        made["bias"][5] = -torch.inf
    target[:] = 3
    log_probs, entropy, *_ = ours.ChunkedLogProb.apply(*made.values(), target, 1.0, 8)
    (log_probs + entropy).sum().backward()
    assert entropy.isfinite().all()
    assert made["hidden"].grad.isfinite().all()
    assert (made["weight"].grad[5] == 0).all()


def test_mixed_dtypes_and_autocast():
    made, target, upstream = leaves()
    half = {name: leaf.detach().bfloat16().requires_grad_() for name, leaf in made.items()}
    mixed = {**half, "hidden": half["hidden"].detach().float().requires_grad_()}
    exact = {name: leaf.detach().float().requires_grad_() for name, leaf in half.items()}
    first = outcome(ours.ChunkedLogProb.apply(*mixed.values(), target, 1.0, 8), mixed, upstream)
    second = outcome(ours.ChunkedLogProb.apply(*exact.values(), target, 1.0, 8), exact, upstream)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(ours.ChunkedLogProb.apply(*made.values(), target, 1.0, 8), made, upstream)
    assert found[0].dtype == torch.float32
    assert [leaf.grad.dtype for leaf in made.values()] == [torch.float32] * 3


@pytest.mark.parametrize("backend", ["torch", TRITON])
def test_half_precision_logits_get_a_gradient_of_their_dtype(backend, monkeypatch):
    """Kernels write a gradient in the logits' dtype, so a buffer of another would be misread by those that take it for that."""
    monkeypatch.setenv("LIGER_BACKEND", backend)
    plan_for, reached = ours.plan_for, []
    monkeypatch.setattr(ours, "plan_for", lambda call: dataclasses.replace(plan_for(call), gemm_dtype=torch.bfloat16))
    kernels = importlib.import_module(f"liger.backends.{backend}")
    row_grad = kernels.row_grad

    def checked(logits, inputs, lse, grad_loss, grad):
        assert grad.dtype == logits.dtype
        reached.append(logits.dtype)
        row_grad(logits, inputs, lse, grad_loss, grad)

    monkeypatch.setattr(kernels, "row_grad", checked)
    made, target, upstream = leaves()
    half = {name: leaf.detach().bfloat16().requires_grad_() for name, leaf in made.items()}
    found = outcome(ours.ChunkedLogProb.apply(*half.values(), target, 1.0, 8), half, upstream)
    assert reached
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        copies = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in half.items()}
        results.append(outcome(truth(copies, target, temperature=1.0, cap=None, scale=1.0), copies, upstream))
    for got, correct, theirs in zip(found, *results, strict=True):
        if got.dtype != torch.bool:
            assert_within_budget(got, correct.detach(), theirs.detach(), torch.bfloat16)


@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=["trained", "frozen"])
@pytest.mark.parametrize("outputs", [("log_probs",), ours.OUTPUTS], ids=["plain", "all"])
def test_a_head_partitioned_by_zero_3(outputs, frozen, monkeypatch):
    """It has data inside of TRL's context alone, where DeepSpeed gathers it for forward and again for backward."""
    made, target, upstream = leaves(frozen=frozen)
    wanted = [leaf for leaf in made.values() if leaf.requires_grad]
    whole = [(made[name], made[name].data) for name in ("weight", "bias")]

    @contextlib.contextmanager
    def gathered(*parameters):
        assert all(one is other for one, (other, _) in zip(parameters, whole, strict=True))
        for parameter, data in whole:
            parameter.data = data
        yield
        for parameter, data in whole:
            parameter.data = data.new_empty(0)

    def scored():
        with utils.maybe_gather_lm_head_ctx(made["weight"], made["bias"]):
            found = ours.ChunkedLogProb.apply(*made.values(), target, 1.0, 8, None, 1.0, outputs)
        total = sum((part * pull).sum() for part, pull in zip(found[:2], upstream, strict=True) if part is not None)
        return [*found, *torch.autograd.grad(total, wanted)]

    exact = scored()
    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", gathered)
    for number, (parameter, data) in enumerate(whole):
        parameter.ds_id, parameter.data = number, data.new_empty(0)
    for one, other in zip(scored(), exact, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_not_asked_for_is_not_computed(monkeypatch):
    calls, entr = [], torch.special.entr
    monkeypatch.setattr(torch.special, "entr", lambda x: calls.append(x) or entr(x))
    made, target, _ = leaves()
    found = ours.ChunkedLogProb.apply(*made.values(), target, 1.0, 8, None, 1.0, ("log_probs", "mean_logits"))
    found[0].sum().backward()
    assert found[1] is None
    assert not calls


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_divides_nothing(temperature):
    made, target, _ = leaves()
    with pytest.raises(ValueError, match="temperature must be positive"):
        ours.ChunkedLogProb.apply(*made.values(), target, temperature, 8)


def test_float64_under_autocast():
    """It leaves float64 alone, in the row kernels' path as in the other."""
    made, target, upstream = leaves(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(ours.ChunkedLogProb.apply(*made.values(), target, 1.0, 8), made, upstream)
    copies = {name: leaf.detach().requires_grad_() for name, leaf in made.items()}
    exact = outcome(truth(copies, target, temperature=1.0, cap=None, scale=1.0), copies, upstream)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype))


def test_A13_no_second_derivative():
    made, target, _ = leaves()
    found = ours.ChunkedLogProb.apply(*made.values(), target, 1.0, 8)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(found[1].sum(), made["hidden"], create_graph=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_selective_log_softmax(masked, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, VOCAB, generator=generator)
    index = torch.randint(VOCAB, (2, 5), generator=generator)
    mask = torch.tensor([[1, 1, 0, 1, 0]] * 2) if masked else None
    gradients = []
    for function in (ours.selective_log_softmax, their_selective):
        leaf = logits.clone().requires_grad_()
        found = function(leaf, index, temperature, mask)
        found.square().sum().backward()
        gradients.append((found.detach(), leaf.grad))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    several = torch.randint(VOCAB, (2, 5, 3), generator=generator)
    assert torch.equal(ours.selective_log_softmax(logits, several), their_selective(logits, several))
    with pytest.raises(ValueError, match="temperature must be positive"):
        ours.selective_log_softmax(logits, index, 0.0)


def test_trainers_find_what_is_installed(monkeypatch):
    """Every module of TRL that holds a name, and the fused head that its trainers add to a model."""
    from trl.experimental.sdft import loss_utils

    calls = []
    apply = ours.ChunkedLogProb.apply
    monkeypatch.setattr(ours.ChunkedLogProb, "apply", staticmethod(lambda *args: calls.append(args[4:]) or apply(*args)))

    def scored():
        model = tiny_models.build("LlamaForCausalLM")
        utils.add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy", "is_top1"))
        output = model(**tiny_models.batch(model), fused_lm_head=True)
        (output.loss + 0.1 * output.entropy.mean()).backward()
        return output, [parameter.grad for parameter in model.parameters()]

    plain, plain_gradients = scored()
    remove = ours.install()
    try:
        with pytest.raises(ValueError, match="must not be replaced already"):
            ours.install()
        assert loss_utils.selective_log_softmax is ours.selective_log_softmax
        found, gradients = scored()
    finally:
        remove()
    assert loss_utils.selective_log_softmax is their_selective
    assert utils._ChunkedLogProbFunction is TheirFunction
    assert len(calls) == 1
    for name in ("loss", "log_probs", "entropy"):
        torch.testing.assert_close(found[name], plain[name])
    assert torch.equal(found.is_top1, plain.is_top1)
    for one, other in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def logged(tmp_path, rows):
    """Losses, entropies and accuracies of three steps of TRL's supervised fine-tuning."""
    tokenizers, datasets, transformers = (pytest.importorskip(name) for name in ("tokenizers", "datasets", "transformers"))
    words = {f"w{i}": i for i in range(tiny_models.VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", bf16=False, seed=0,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        tiny_models.build("LlamaForCausalLM"),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
    )
    trainer.train()
    names = ("loss", "entropy", "mean_token_accuracy", "grad_norm")
    return [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")  # of TRL's own dependencies
def test_a_run_of_supervised_fine_tuning(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def text(count):
        return "".join(f" w{i}" for i in torch.randint(4, tiny_models.VOCAB, (count,), generator=generator).tolist())

    rows = [{"prompt": text(5), "completion": text(1 + i % 5)} for i in range(16)]
    plain, calls, apply = logged(tmp_path, rows), [], ours.ChunkedLogProb.apply
    monkeypatch.setattr(ours.ChunkedLogProb, "apply", staticmethod(lambda *args: calls.append(args) or apply(*args)))
    remove = ours.install()
    try:
        found = logged(tmp_path, rows)
    finally:
        remove()
    assert len(calls) == 6
    assert len(found) == 3
    for one, other in zip(found, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
