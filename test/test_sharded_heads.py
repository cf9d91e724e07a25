"""Heads that other tools have sharded: DTensors, FSDP2, and the calls that Megatron-Core and Transformer Engine make."""

import inspect
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from liger import VocabParallel, liger_cross_entropy, liger_fused_linear_cross_entropy
from liger.integrations import _logits
from liger.integrations.fsdp import gather_weight
from liger.integrations.megatron import fused_vocab_parallel_cross_entropy, vocab_parallel_cross_entropy
from liger.integrations.transformer_engine import parallel_cross_entropy
from liger.testing import make_inputs

V, H = 37, 16
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # fp32 sums of a few dozen terms of order 1, in another order


def mesh_of(rank):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(rank.groups["two"], "cpu")


def tensor_parallel(rank, options):
    """Loss and gradients with all tensors as DTensors: (ours, dx, whole dW, whole db)."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, inputs = mesh_of(rank), make_inputs(8, V, H, bias=True, class_weight=True)

    def placed(tensor, placement):
        return distribute_tensor(tensor, mesh, [placement])

    tokens = Shard(0) if options.get("sequence_parallel") else Replicate()
    x = placed(inputs.input, tokens).requires_grad_()
    weight, bias = (placed(t, Shard(0)).requires_grad_() for t in (inputs.weight, inputs.bias))
    split = VocabParallel.from_dtensor(weight, **options)
    loss = liger_fused_linear_cross_entropy(
        x,
        weight,
        placed(inputs.target, Replicate()),
        bias,
        placed(inputs.class_weight, Shard(0)),
        label_smoothing=0.1,
        vocab_parallel=split,
    )
    loss.backward()
    return loss.item(), *(tensor.grad.full_tensor() for tensor in (x, weight, bias))


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"reduce_input_grad": False}])
def test_tensor_parallel_head(world, options):
    """37 rows over two: 19 and 18. With reduce_input_grad=False the input's gradient is a DTensor still to be summed."""
    inputs = make_inputs(8, V, H, bias=True, class_weight=True)
    leaves = inputs.leaves()
    loss = liger_fused_linear_cross_entropy(
        leaves.input, leaves.weight, leaves.target, leaves.bias, leaves.class_weight, label_smoothing=0.1
    )
    loss.backward()
    for value, *gradients in world.run("two", tensor_parallel, options):
        assert value == pytest.approx(loss.item(), rel=1e-6)
        for ours, leaf in zip(gradients, (leaves.input, leaves.weight, leaves.bias), strict=True):
            torch.testing.assert_close(ours, leaf.grad, **CLOSE)


def not_waited_for(rank, backend, fused):
    """(loss, gradients) of what collectives give at once, and of the same with values."""
    from torch.distributed import _functional_collectives as lazily

    group, inputs = rank.groups["two"], make_inputs(4, V, H if fused else None)

    def gathered(tensor):
        if not tensor.is_floating_point():
            return lazily.all_gather_tensor(tensor, 0, group)
        return lazily.all_gather_tensor_autograd(tensor.detach().requires_grad_(), 0, group)

    def computed(gathered, upstream):
        x, target = gathered(inputs.input), gathered(inputs.target)
        if not fused:
            loss = liger_cross_entropy(x, target, backend=backend)
            return [loss.detach(), *torch.autograd.grad(loss, [x], upstream)]
        weight = gathered(inputs.weight)
        loss = liger_fused_linear_cross_entropy(x, weight, target, backend=backend)
        return [loss.detach(), *torch.autograd.grad(loss, [x, weight], upstream)]

    assert isinstance(gathered(inputs.target), lazily.AsyncCollectiveTensor)
    assert isinstance(gathered(inputs.input), lazily.AsyncCollectiveTensor)
    lazy = [lazily.wait_tensor(part) for part in computed(gathered, lazily.all_reduce(torch.ones(()), "sum", group))]
    plain = computed(lambda t: torch.cat([t.detach(), t.detach()]).requires_grad_(t.is_floating_point()), torch.tensor(2.0))
    return lazy, plain


def test_results_of_collectives_that_are_still_under_way(world, loss):
    """Their tensors have no memory of their own to read from."""
    loss.needs(torch.float32)
    if loss.device != "cpu":
        pytest.skip("the ranks are on the CPU")
    for lazy, plain in world.run("two", not_waited_for, loss.row.backend, loss.fused):
        for ours, theirs in zip(lazy, plain, strict=True):
            assert torch.equal(ours, theirs)


def beside_loss_parallel(rank):
    """[(loss, whole gradient)] of torch's loss_parallel and ours, on the same sharded logits."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh, inputs = mesh_of(rank), make_inputs(8, V)
    found = []
    for ours in (False, True):
        logits = distribute_tensor(inputs.input, mesh, [Shard(1)]).requires_grad_()
        if ours:
            split = VocabParallel.even(V, mesh.get_group())
            loss = liger_cross_entropy(logits, inputs.target, vocab_parallel=split)
            loss.backward()
        else:
            with loss_parallel():
                loss = F.cross_entropy(logits, inputs.target)
                loss.backward()
        value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        found.append((value.item(), logits.grad.full_tensor()))
    return found


def test_parity_with_loss_parallel(world):
    for (theirs, their_gradient), (ours, our_gradient) in world.run("two", beside_loss_parallel):
        assert ours == pytest.approx(theirs, rel=1e-6)
        torch.testing.assert_close(our_gradient, their_gradient, **CLOSE)


def refusals(rank):
    """What is said to DTensors that do not fit."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, inputs = mesh_of(rank), make_inputs(8, V, H)
    weight = distribute_tensor(inputs.weight, mesh, [Shard(0)])
    split, x, target = VocabParallel.from_dtensor(weight), inputs.input, inputs.target

    def said(function, *args, **options):
        try:
            function(*args, **options)
        except ValueError as error:
            return str(error)
        return None

    columns, whole = (distribute_tensor(inputs.weight, mesh, [place]) for place in (Shard(1), Replicate()))
    loss = liger_fused_linear_cross_entropy
    tokens = distribute_tensor(x, mesh, [Shard(0)])
    return {
        "not stated": said(loss, x, weight, target),
        "logits": said(liger_cross_entropy, distribute_tensor(x, mesh, [Shard(1)]), target),
        "columns": said(VocabParallel.from_dtensor, columns),
        "replicated": said(loss, x, whole, target, vocab_parallel=split),
        "tokens": said(loss, tokens, weight, target, vocab_parallel=split),
        "plain": said(VocabParallel.from_dtensor, inputs.weight),
        "fsdp columns": said(gather_weight, columns),
        "fsdp plain": said(gather_weight, inputs.weight),
    }


REFUSALS = {
    "not stated": "VocabParallel.from_dtensor(head). If ranks have different tokens (FSDP): liger.integrations.fsdp",
    "logits": "input.to_local(), with vocab_parallel= where that holds some of the classes only",
    "columns": "weight must be a DTensor with placements (Shard(dim=0),)",
    "replicated": "weight must be a DTensor with placements (Shard(dim=0),)",
    "tokens": "input must be a DTensor with placements (Replicate(),)",
    "plain": "weight must be a DTensor, got Tensor: use VocabParallel.even",
    "fsdp columns": "weight must have placements (Shard(0),)",
    "fsdp plain": "weight must be a DTensor, got Tensor",
}


def test_a_sharding_is_never_guessed(world):
    for said in world.run("two", refusals):
        assert {name: message for name, message in REFUSALS.items() if message not in (said[name] or "")} == {}, said


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(H, V, bias=False)

    def forward(self, x):
        return x


def under_fsdp(rank, how):
    """(loss, whole gradient of the head): ranks have different tokens, the loss is their mean."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Head()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if how == "hsdp" else None
    fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = make_inputs(8, V, H, seed=rank.rank, ignored=0.0)
    weight = model.lm_head.weight
    head = weight.full_tensor() if how == "full_tensor" else gather_weight(weight)
    loss = liger_fused_linear_cross_entropy(inputs.input, head, inputs.target)
    loss.backward()
    gradient = weight.grad.full_tensor()
    return loss.item(), gradient


def expected_under_fsdp():
    torch.manual_seed(0)
    weight = Head().lm_head.weight
    losses = []
    for seed in range(4):
        inputs = make_inputs(8, V, H, seed=seed, ignored=0.0)
        losses.append(F.cross_entropy(inputs.input @ weight.t(), inputs.target))
    (sum(losses) / 4).backward()
    return [loss.item() for loss in losses], weight.grad


@pytest.mark.parametrize("how", ["fsdp", "hsdp"])
def test_fsdp_gradients_are_averaged(world, how):
    losses, gradient = expected_under_fsdp()
    for place, (value, ours) in enumerate(world.run(None, under_fsdp, how)):
        assert value == pytest.approx(losses[place], rel=1e-5)
        torch.testing.assert_close(ours, gradient, **CLOSE)


def test_full_tensor_alone_would_be_silently_wrong(world):
    """Why the message names gather_weight: if torch reduces this one day, the message may change."""
    _, gradient = expected_under_fsdp()
    for _, theirs in world.run(None, under_fsdp, "full_tensor"):
        assert not torch.allclose(theirs, gradient, **CLOSE)


def adapted(rank, name, dtype, arguments):
    """(loss, gradient of this rank's logits, and a second result)"""
    group, inputs = rank.groups["two"], make_inputs(6, 38, dtype=dtype, ignored=0.34)
    own = inputs.input.chunk(2, 1)[dist.get_rank(group)].reshape(3, 2, 19).clone().requires_grad_()
    target = inputs.target.reshape(3, 2)
    if name == "megatron":
        loss, more = vocab_parallel_cross_entropy(own, target, *arguments, tp_group=group), None
    elif name == "fused megatron":
        loss, more = fused_vocab_parallel_cross_entropy(own, target, group), None
    else:
        loss, more = parallel_cross_entropy(own, target, dist_process_group=group, return_log_sum_exp=True, **arguments)
    before = own.detach().clone()
    loss.sum().backward()
    assert torch.equal(own, before)
    return loss.detach(), own.grad, more


def plain(dtype, arguments):
    """What the call means, with torch on the whole vocabulary: (loss per token or mean, gradient, logsumexp)."""
    inputs = make_inputs(6, 38, dtype=dtype, ignored=0.34)
    z = inputs.input.float().requires_grad_()
    reduction = "mean" if arguments.get("reduce_loss") else "none"
    loss = F.cross_entropy(z, inputs.target, label_smoothing=arguments.get("label_smoothing", 0.0), reduction=reduction)
    lse, valid = z.logsumexp(-1), inputs.target != -100
    extra = arguments.get("z_loss_weight", 0.0) * lse.square() * valid
    loss = loss + (extra.sum() / valid.sum() if reduction == "mean" else extra)
    loss.sum().backward()
    return loss.detach(), z.grad, (lse * valid).detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "arguments", "meaning"),
    [
        ("megatron", [], {}),
        ("megatron", [0.1], {"label_smoothing": 0.1 * 38 / 37}),  # its mass goes to the other 37 classes
        ("fused megatron", [], {}),
        ("te", {}, {}),
        ("te", {"label_smoothing": 0.1, "z_loss_weight": 0.01}, {"label_smoothing": 0.1, "z_loss_weight": 0.01}),
        ("te", {"reduce_loss": True, "z_loss_weight": 0.01}, {"reduce_loss": True, "z_loss_weight": 0.01}),
    ],
)
def test_adapters(world, name, arguments, meaning, dtype):
    loss, gradient, lse = plain(dtype, meaning)
    rounding = {"rtol": 2**-8, "atol": 2**-8 * gradient.abs().max().item()} if dtype == torch.bfloat16 else CLOSE
    for place, (ours, own, more) in enumerate(world.run("two", adapted, name, dtype, arguments)):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.reshape(loss.shape), loss, **CLOSE)
        assert own.dtype == dtype
        torch.testing.assert_close(own.float().reshape(6, 19), gradient.chunk(2, 1)[place], **rounding)
        if more is not None:
            torch.testing.assert_close(more.flatten(), lse, **CLOSE)


def of_one_class(rank, label_smoothing):
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    try:
        return vocab_parallel_cross_entropy(torch.ones(2, 1, 1), torch.zeros(2, 1, dtype=torch.int64), label_smoothing, group)
    except ValueError as error:
        return str(error)


def test_smoothing_over_no_other_class(world):
    assert all(loss.eq(0).all() for loss in world.run(None, of_one_class, 0.0))
    assert all("label_smoothing must be at most (V - 1) / V for V = 1" in error for error in world.run(None, of_one_class, 0.1))


def test_adapters_on_one_device(monkeypatch):
    monkeypatch.setenv("LIGER_BACKEND", "torch")
    inputs = make_inputs(6, 38)
    loss = parallel_cross_entropy(inputs.input, inputs.target, reduce_loss=True)
    torch.testing.assert_close(loss, F.cross_entropy(inputs.input, inputs.target))
    given, cross_entropy = [], _logits.liger_cross_entropy

    def recorded(logits, target, **options):
        given.append((logits.dtype, options))
        return cross_entropy(logits, target, **options)

    monkeypatch.setattr(_logits, "liger_cross_entropy", recorded)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype in dtypes:
        logits = inputs.input.to(dtype).requires_grad_()
        loss, lse = parallel_cross_entropy(logits, inputs.target, return_log_sum_exp=True)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert loss.dtype == lse.dtype == wide
        torch.testing.assert_close(loss, F.cross_entropy(logits.to(wide), inputs.target, reduction="none"))
        torch.testing.assert_close(lse, logits.to(wide).logsumexp(-1) * (inputs.target != -100))
        assert torch.autograd.grad(loss.sum(), logits)[0].dtype == dtype
    assert [dtype for dtype, _ in given] == [*dtypes]  # no copy is made, and no backend is asked for an option of few
    assert not any("loss_dtype" in options for _, options in given)
    with pytest.warns(FutureWarning, match="use inp"):
        parallel_cross_entropy(None, inputs.target, _input=inputs.input)
    with pytest.raises(ValueError, match="tp_group must be given where Megatron-Core cannot be imported"):
        vocab_parallel_cross_entropy(inputs.input, inputs.target)


def test_signatures():
    """Of Megatron-Core 0.16's and Transformer Engine 2.14's functions: names, order and defaults."""

    def plainly(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, None if p.default is p.empty else p.default, p.kind.name) for p in parameters]

    positional, keyword = "POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"
    assert plainly(vocab_parallel_cross_entropy) == [
        ("vocab_parallel_logits", None, positional),
        ("target", None, positional),
        ("label_smoothing", 0.0, positional),
        ("tp_group", None, positional),
    ]
    assert [name for name, *_ in plainly(fused_vocab_parallel_cross_entropy)] == ["vocab_parallel_logits", "target", "tp_group"]
    assert plainly(parallel_cross_entropy) == [
        ("inp", None, positional),
        ("target", None, positional),
        ("label_smoothing", 0.0, positional),
        ("reduce_loss", False, positional),
        ("dist_process_group", None, positional),
        ("ignore_idx", -100, positional),
        ("is_cg_capturable", False, positional),
        ("z_loss_weight", 0.0, positional),
        ("_input", None, keyword),
        ("return_log_sum_exp", False, keyword),
    ]


def copied(rank):
    from liger import LigerCrossEntropyLoss

    module = LigerCrossEntropyLoss(vocab_parallel=VocabParallel.even(V, rank.groups["two"]))
    return repr(deepcopy(module)) == repr(module), repr(module)


def test_a_module_that_holds_a_group_may_be_copied(world):
    for same, text in world.run("two", copied):
        assert same
        assert "vocab_parallel=" in text
