"""The loss inside a training step: autocast, loss scaling, checkpointing, offloaded tensors, DDP, compiled transformers."""

import contextlib
import functools
import itertools
import math
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import liger
from liger.dispatch import OPS, Request, device_info, table
from liger.testing import Inputs

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HALF = [BF16, F16]
VOCAB = 56


@pytest.fixture(autouse=True)
def _one_thread():
    """Waiting for each other costs two threads ten times what they save at these sizes; and one adds in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Transformer(nn.Module):
    """One block between an embedding and the head tied to it, and the loss of a target per token."""

    def __init__(self, loss, width=16):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.loss = loss

    def forward(self, tokens, target):
        h = self.embedding(tokens)
        q, k, v = self.qkv(self.norms[0](h)).chunk(3, -1)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.mT / q.shape[2] ** 0.5).masked_fill(later, -math.inf)
        h = h + self.projection(scores.softmax(-1) @ v)
        h = h + self.mlp(self.norms[1](h))
        h, head = self.norms[2](h), self.embedding.weight
        if isinstance(self.loss, liger.LigerFusedLinearCrossEntropyLoss):
            return self.loss(head, h, target)
        return self.loss(F.linear(h, head), target)


class TorchLoss(nn.Module):
    def forward(self, logits, target):
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def module_for(op, backend, **options):
    if op == "fused_linear_cross_entropy":
        return liger.LigerFusedLinearCrossEntropyLoss(backend=backend, **options)
    return liger.LigerCrossEntropyLoss(backend=backend, **options)


def module_of(subject, **options):
    return module_for(subject.row.op, subject.row.backend, **options)


def transformer(loss, device="cpu"):
    """The same numbers every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(loss).to(device)


SMALL, LARGE = ((2, 3), (3, 2), (4, 5), (3, 7)), ((8, 24), (16, 12), (12, 32), (12, 20))
SIZES = {"cpu": SMALL, "cuda": LARGE}


def batches(steps, device="cpu", sizes=None):
    """(tokens, target) of a rule that can be learned, of several sizes in turn; every fourth target is ignored."""
    generator = torch.Generator().manual_seed(0)
    for size in itertools.islice(itertools.cycle(sizes or SIZES[device]), steps):
        tokens = torch.randint(VOCAB, size, generator=generator)
        target = (5 * tokens + 3) % VOCAB
        target.flatten()[::4] = -100
        yield tokens.to(device), target.to(device)


def train(model, data, *, forward=None, autocast=None, scaler=None, warm_up=math.inf):
    """The loss of every step; after `warm_up` of them nothing may be compiled any more."""
    forward = model if forward is None else forward
    device = next(model.parameters()).device.type
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curve = []
    for step, (tokens, target) in enumerate(data):
        stance = torch.compiler.set_stance("fail_on_recompile") if step >= warm_up else contextlib.nullcontext()
        optimizer.zero_grad()
        with stance, torch.autocast(device, autocast, enabled=autocast is not None):
            value = forward(tokens, target)
        if scaler is None:
            value.backward()
            optimizer.step()
        else:
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        curve.append(value.detach().clone())  # a CUDA graph writes the next loss to the same place
    return torch.stack(curve).double()


@contextlib.contextmanager
def poisoned(device):
    """Memory that nobody has written is full of NaN: filled by torch on a CPU, left there by its last owner on a GPU."""
    if device == "cpu":
        torch.use_deterministic_algorithms(True)
    else:
        torch.cuda.empty_cache()
        blocks = [torch.full((size,), math.nan, device=device) for size in [1 << 7] * 4096 + [1 << 14] * 256 + [1 << 24] * 2]
        del blocks
    try:
        assert torch.empty(1 << 22, device=device).isnan().any()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def head(subject, input, weight, target, **options):
    """The loss of hidden states: the op's own head, or a product before it."""
    if subject.fused:
        return subject(Inputs(input, target, weight), **options)
    return subject(Inputs(F.linear(input, weight), target), **options)


def head_inputs(subject, hidden=16):
    """(hidden, weight, target); the first two want gradients."""
    rows = 4 if subject.interpreted else 12
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, hidden, generator=generator), torch.randn(VOCAB, hidden, generator=generator)
    target = torch.randint(VOCAB, (rows,), generator=generator)
    target[::4] = -100
    return (
        x.to(subject.device).requires_grad_(),
        weight.to(subject.device).requires_grad_(),
        target.to(subject.device),
    )


# --- Compiled steps -------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


tracing = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own tracing


@tracing
def test_one_graph_without_breaks(loss, fresh_dynamo):
    ((tokens, target),) = batches(1, loss.device)
    found = torch._dynamo.explain(transformer(module_of(loss), loss.device))(tokens, target)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found


@tracing
def test_a_compiled_transformer_trains_as_an_eager_one(loss, fresh_dynamo):
    """AOTAutograd's graphs hold the operators that eager runs, so in fp32 not one bit of the curve may differ."""
    steps = 3 if loss.interpreted else 15
    eager, traced = (transformer(module_of(loss), loss.device) for _ in range(2))
    # By itself torch.compile sees in the second step what varies.
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager", dynamic=True if loss.interpreted else None)
    with poisoned(loss.device):
        wanted = train(eager, batches(steps, loss.device))
    with poisoned(loss.device):
        curve = train(traced, batches(steps, loss.device), forward=compiled, warm_up=1 if loss.interpreted else 2)
    assert torch.equal(curve, wanted)
    assert same(traced.parameters(), eager.parameters())
    if not loss.interpreted:
        assert wanted[-1] < wanted[0] - 0.5


@functools.cache
def torch_curve(device, dtype, autocast):
    """200 steps with torch's own loss."""
    return train(transformer(TorchLoss(), device).to(dtype), batches(200, device, LARGE), autocast=autocast)


@tracing
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # asks for less precision
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")  # of the transformer's attention
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # the first one, of torch's own pool
@pytest.mark.parametrize(("autocast", "mode"), [(BF16, "default"), (BF16, "reduce-overhead"), (None, "default")], ids=str)
def test_200_compiled_steps_follow_the_eager_ones(loss, fresh_dynamo, autocast, mode):
    """Inductor's body rounds elsewhere than eager's, and CUDA graphs project ignored rows as well.

    What that may do is measured with torch's own loss: how far its eager curve in bf16 strays from the one in fp32, and
    that in fp32 from float64's. Other roundings may stray twice as far.
    """
    if loss.interpreted or (loss.device == "cpu" and (autocast, mode) != (BF16, "default")):
        pytest.skip("200 steps of a compiled transformer take long: one kind of them is enough on a CPU")

    truth = torch_curve(loss.device, F32 if autocast else F64, None)
    theirs = torch_curve(loss.device, F32, autocast)
    data = list(batches(200, loss.device, LARGE))
    eager = train(transformer(module_of(loss), loss.device), data, autocast=autocast)
    traced = transformer(module_of(loss), loss.device)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(traced, fullgraph=True, mode=mode)
    curve = train(traced, data, forward=compiled, autocast=autocast, warm_up=3 * len(LARGE))
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    rounding = torch.finfo(autocast or F32).eps / 2 * truth.max()
    noise = (theirs - truth).abs().max() + rounding
    assert truth[-1] < 0.1 * truth[0]
    assert (eager - truth).abs().max() <= 2 * noise
    assert (curve - truth).abs().max() <= 2 * noise


@tracing
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager_in_memory_full_of_nan(loss, fresh_dynamo, backend, reduction):
    """What the ignored quarter does not compute is zero, not what happened to be there."""
    if loss.interpreted and backend == "inductor":
        pytest.skip("the operator that aot_eager runs")
    module = module_of(loss, reduction=reduction, return_z_loss=True, lse_square_scale=1e-3, return_predicted_tokens=True)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    inputs = loss.inputs(4 if loss.interpreted else 16, VOCAB, ignored=0.25)
    results = []
    for call in (module, compiled):
        with poisoned(loss.device):
            leaves = inputs.leaves()
            output = call(*(leaves.weight, leaves.input)[not loss.fused :], leaves.target)
            output.loss.backward(torch.ones_like(output.loss))
        gradients = [t.grad for t in (leaves.input, leaves.weight) if t is not None]
        results.append([output.loss, output.z_loss, output.predicted_tokens, *gradients])
    assert same(*results)
    assert all(tensor.isfinite().all() for tensor in results[0])


# --- Autocast -------------------------------------------------------------------------------------


@tracing
@pytest.mark.parametrize(
    ("place", "backend", "dtype"),
    [("around", "eager", BF16), ("around", "eager", F16), ("around", "aot_eager", F16), ("inside", "aot_eager", BF16)],
    ids=str,
)
def test_autocast_and_compile(loss, fresh_dynamo, place, backend, dtype):
    """Hidden states come in autocast's dtype, the head's weight in fp32. "eager" runs a traced graph under the caller's
    autocast, which must not reach into the operator: class weights and smoothing make products of their own.
    """
    inputs = loss.inputs(2 if loss.interpreted else 8, VOCAB, ignored=0.0, class_weight=True)
    inputs = replace(inputs, input=inputs.input.to(dtype))

    def bare(leaves):
        return loss(leaves, label_smoothing=0.1)

    def wrapped(leaves):
        with torch.autocast(loss.device, dtype):
            return bare(leaves)

    def traced(*tensors):
        return (wrapped if place == "inside" else bare)(Inputs(*tensors))

    compiled = torch.compile(traced, fullgraph=True, backend=backend)
    results = []
    for call in (wrapped, lambda leaves: compiled(*(getattr(leaves, name) for name in Inputs.__dataclass_fields__))):
        leaves = inputs.leaves()
        with torch.autocast(loss.device, dtype, enabled=place == "around"):
            value = call(leaves)
            value.backward()
        gradients = [t.grad for t in (leaves.input, leaves.weight) if t is not None]
        assert value.dtype == F32
        assert [gradient.dtype for gradient in gradients] == [dtype, F32][: len(gradients)]
        results.append([value, *gradients])
    assert same(*results)


@pytest.mark.parametrize("autocast", HALF, ids=str)
def test_fp32_master_weights_get_a_gradient_that_was_never_rounded(flce, autocast):
    """With W = 0, 256 classes and 2^k valid rows, every factor of dW is a number in 8 bits: what a GPU rounds before its
    products loses nothing. What is left is the sum's own error, in fp32; one rounding to bf16 would be 2^-9, to fp16 2^-12.
    """
    vocab, valid = 256, 32 if flce.interpreted else 256
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.randint(128, (valid + valid // 4, 8), generator=generator) / 128
    target = torch.randint(8, (len(x),), generator=generator)  # the other classes' terms are all positive
    target[::5] = -100
    inputs = flce.tensors(x, target, weight=torch.zeros(vocab, 8))
    leaves = inputs.leaves()
    with torch.autocast(flce.device, autocast):
        value = flce(leaves, chunk_size=24)
    (value * 1024).backward()
    gradient = leaves.weight.grad
    assert gradient.dtype == F32
    kept = (target != -100).double()
    exact = (kept @ x.double() * (1024 / valid / vocab)).to(flce.device)

    def error(found):
        return (found[8:].double() / exact - 1).abs().max()

    once = gradient.to(autocast).float()
    assert not torch.equal(gradient, once)
    allowed = valid * torch.finfo(F32).eps  # a GPU's accumulator truncates
    assert error(gradient) <= allowed
    assert error(once) > 5 * allowed


@pytest.mark.parametrize("autocast", HALF, ids=str)
def test_training_under_autocast_is_as_exact_as_torchs(loss, autocast):
    """With a GradScaler in fp16: it starts too high, skips its first step and comes down to 2^12.

    The yardstick is the same training with torch's loss: how far its curve strays from the fp32 one.
    """
    steps = 3 if loss.interpreted else 25
    data = list(batches(steps, loss.device))

    def curve_of(module, dtype):
        model = transformer(module, loss.device)
        if dtype != F16:
            return train(model, data, autocast=dtype)
        scaler = torch.amp.GradScaler(loss.device, init_scale=2.0**36, backoff_factor=2.0**-24)
        curve = train(model, [data[0], *data], autocast=dtype, scaler=scaler)
        assert scaler.get_scale() == 2**12, "more or less than one step was skipped"
        assert torch.equal(curve[0], curve[1]), "the skipped step changed something"
        assert all(parameter.grad.dtype == F32 for parameter in model.parameters())
        return curve[1:]

    truth = curve_of(TorchLoss(), None)
    assert truth[-1] < truth[0]
    noise = (curve_of(TorchLoss(), autocast) - truth).abs().max()
    assert (curve_of(module_of(loss), autocast) - truth).abs().max() <= 2 * noise + loss.rounding(autocast) * truth.max()


def test_N19_under_a_grad_scaler(loss):
    """Gradients of 1/(24 V) are subnormal in fp16, and off by a per cent, unless the loss scale is in them when they are
    rounded.
    """
    rows, vocab = 24, 16384
    weight = torch.zeros(vocab, 4, device=loss.device, requires_grad=True)
    x, target = torch.ones(rows, 4, device=loss.device), torch.zeros(rows, dtype=torch.int64, device=loss.device)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler(loss.device, init_scale=2.0**15)  # which the target's gradients add up to
    with torch.autocast(loss.device, F16):
        value = head(loss, x, weight, target)
    scaler.scale(value).backward()
    scaler.unscale_(optimizer)
    # Roundings of the logits' gradient, of the loss scale in it, and of the head's product.
    assert (weight.grad[1:].double() * vocab - 1).abs().max() <= 3 * loss.rounding(F16)
    scaler.step(optimizer)
    assert torch.allclose(weight[1:], torch.full_like(weight[1:], -1 / vocab), rtol=3 * loss.rounding(F16), atol=0)


# --- Checkpointing, functional calls, saved tensors ---------------------------------------------------------


def gradients(value, *leaves):
    """By backward: reentrant checkpoints refuse torch.autograd.grad."""
    for leaf in leaves:
        leaf.grad = None
    value.backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpointing(loss, reduction, reentrant):
    x, weight, target = head_inputs(loss)
    runs = []

    def step(x, weight):
        runs.append(torch.is_grad_enabled())
        return head(loss, x, weight, target, reduction=reduction)

    plain = step(x * 1, weight)
    wanted = gradients((3 * plain).sum(), x, weight)
    runs.clear()
    value = checkpoint(step, x * 1, weight, use_reentrant=reentrant)
    assert torch.equal(value, plain)
    assert same(gradients((3 * value).sum(), x, weight), wanted)
    assert runs == [not reentrant, True], "not computed again"


def test_checkpointing_in_place(ce):
    """The logits are the checkpoint's own, and made again."""
    ce.needs(in_place=True)
    x, weight, target = head_inputs(ce)
    for reentrant in (False, True):
        wanted = gradients(head(ce, x, weight, target), x, weight)
        value = checkpoint(lambda x, w: head(ce, x, w, target, in_place=True), x, weight, use_reentrant=reentrant)
        assert same(gradients(value, x, weight), wanted)


@tracing
def test_checkpointing_inside_a_compiled_step(loss, fresh_dynamo):
    x, weight, target = head_inputs(loss)

    def step(x, weight):
        return checkpoint(lambda x, w: head(loss, x, w, target), x * 1, weight, use_reentrant=False)

    wanted = gradients(step(x, weight), x, weight)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert same(gradients(compiled(x, weight), x, weight), wanted)


class Copies(torch.autograd.graph.saved_tensors_hooks):
    """Keeps a copy of every saved tensor, and hands out another each time."""

    def __init__(self):
        self.packed = 0
        super().__init__(self.pack, torch.clone)

    def pack(self, tensor):
        self.packed += 1
        return tensor.detach().clone()


@pytest.mark.parametrize("hooks", [torch.autograd.graph.save_on_cpu, Copies], ids=["save_on_cpu", "copies"])
@pytest.mark.parametrize(("reduction", "dtype"), [("mean", F32), ("mean", F16), ("none", F32)], ids=str)
def test_saved_tensor_hooks(loss, reduction, dtype, hooks):
    """What is saved may come back as another tensor, in another place, each time it is asked for."""
    loss.needs(dtype)
    inputs = loss.inputs(2 if loss.interpreted else 8, VOCAB, dtype=dtype, ignored=0.5)

    def outcome(factors, context):
        leaves = inputs.leaves()
        with context:
            value = loss(leaves, reduction=reduction).float().sum()
        for factor in factors:
            (factor * value).backward(retain_graph=factor != factors[-1])
        return [t.grad for t in (leaves.input, leaves.weight) if t is not None]

    for factors in ([3.0], [1.0, 3.0]):
        context = hooks()
        assert same(outcome(factors, context), outcome(factors, contextlib.nullcontext()))
        assert not isinstance(context, Copies) or context.packed


def test_saved_tensor_hooks_in_place(ce):
    ce.needs(in_place=True)
    inputs = ce.inputs(8, VOCAB)
    leaves, others = inputs.leaves(), inputs.leaves()
    with Copies() as _:
        value = ce(replace(leaves, input=leaves.input * 1), in_place=True)
    (3 * value).backward()
    (3 * ce(others)).backward()
    assert torch.equal(leaves.input.grad, others.input.grad)


def test_functional_call(loss):
    """Parameters, and the loss's class weights, are those of the call."""
    generator = torch.Generator().manual_seed(1)
    name = "ce_weight" if loss.fused else "weight"
    classes, others = torch.rand(2, VOCAB, generator=generator) + 0.5
    model = transformer(module_of(loss, **{name: classes}), loss.device)
    twin = transformer(module_of(loss, **{name: others}), loss.device)
    given = {key: tensor.detach().clone() * 1.5 for key, tensor in model.named_parameters()}
    with torch.no_grad():
        for key, parameter in twin.named_parameters():
            parameter.copy_(given[key])
    given = {key: tensor.requires_grad_() for key, tensor in given.items()}
    before = [tensor.clone() for tensor in model.state_dict().values()]
    ((tokens, target),) = batches(1, loss.device)
    own = model(tokens, target)
    value = torch.func.functional_call(model, {**given, f"loss.{name}": others.to(loss.device)}, (tokens, target))
    value.backward()
    wanted = twin(tokens, target)
    wanted.backward()
    assert torch.equal(value, wanted)
    assert value != own
    assert same([tensor.grad for tensor in given.values()], [p.grad for p in twin.parameters()])
    assert same(model.state_dict().values(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


# --- Several processes ----------------------------------------------------------------------------


def batch_of(rank):
    """Rank 1 has nothing to learn from."""
    tokens, target = list(batches(2))[rank]
    return tokens, torch.full_like(target, -100) if rank else target


def rank_of_two(rank, folder, losses):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    results = []
    for op, backend in losses:
        model = transformer(module_for(op, backend))
        parallel = nn.parallel.DistributedDataParallel(model)
        value = parallel(*batch_of(rank))
        value.backward()
        results.append([value.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_DDP_with_a_rank_whose_rows_are_all_ignored(tmp_path):
    """Every gradient is the average over the ranks, of which one has only zeros; torch's mean over nothing is NaN."""
    cpu = device_info(torch.device("cpu"))
    losses = []
    for op, shape in zip(OPS, ((8, VOCAB), (8, VOCAB, 16)), strict=True):
        losses += [(op, row.backend) for row in table(op) if not row.reasons(Request(op, cpu, F32, shape, ()))]
    torch.multiprocessing.spawn(rank_of_two, (str(tmp_path), losses), nprocs=2)
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert losses
    for (op, backend), first, second in zip(losses, *both, strict=True):
        alone = [transformer(module_for(op, backend)) for _ in range(2)]
        for rank, model in enumerate(alone):
            model(*batch_of(rank)).backward()
        assert second[0] == 0
        assert first[0] > 0
        for got, other, *parts in zip(first[1:], second[1:], *(m.parameters() for m in alone), strict=True):
            assert torch.equal(got, other)
            assert not parts[1].grad.any()
            assert torch.equal(got, (parts[0].grad + parts[1].grad) / 2)
