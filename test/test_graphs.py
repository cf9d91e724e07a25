"""Traced and captured graphs: torch.compile, torch.export, the opaque operators, CUDA graphs, no waiting for the device."""

import warnings
from dataclasses import fields, replace

import pytest
import torch
from projecting import projected_ahead
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import liger
from liger import operators
from liger.call import NUMBERS, Call, Needs, Recipe
from liger.options import CrossEntropyOptions

EXTRAS = {
    "label_smoothing": 0.1,
    "softcap": 5.0,
    "logit_scale": 0.5,
    "lse_square_scale": 1e-3,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own tracing


def module_of(subject, **options):
    modules = {True: liger.LigerFusedLinearCrossEntropyLoss, False: liger.LigerCrossEntropyLoss}
    return modules[subject.fused](backend=subject.row.backend, **options)


def outcome(loss, inputs, upstream=None):
    """Everything a step gives: outputs, then gradients."""
    leaves = inputs.leaves()
    given = (leaves.weight, leaves.input, leaves.target) if leaves.weight is not None else (leaves.input, leaves.target)
    output = loss(*given)
    output = output if isinstance(output, tuple) else (output,)
    output[0].backward(upstream if upstream is not None else torch.ones_like(output[0]))
    gradients = [leaf.grad for leaf in (leaves.input, leaves.weight) if leaf is not None]
    return [tensor.detach() for tensor in output if tensor is not None] + gradients


@pytest.mark.parametrize("options", [{}, EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_C1_compiled_equals_eager_with_dynamic_rows(loss, reduction, options):
    """fullgraph from a cold start; other row counts, with other numbers of ignored rows, need no second compilation."""
    loss.needs()
    torch._dynamo.reset()
    module = module_of(loss, reduction=reduction, **options)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, stance in ((12, "default"), (20, "fail_on_recompile"), (33, "fail_on_recompile")):
        inputs = loss.inputs(rows, 67, seed=rows)
        inputs.target[::4] = -100
        upstream = torch.arange(rows, device=inputs.target.device) * 0.5 if reduction == "none" else None
        with torch.compiler.set_stance(stance):
            traced = outcome(compiled, inputs, upstream)
        for ours, theirs in zip(outcome(module, inputs, upstream), traced, strict=True):
            assert torch.equal(ours, theirs)


def test_C1_inductor_equals_eager(loss):
    loss.needs()
    torch._dynamo.reset()
    module = module_of(loss)
    inputs = loss.inputs(12, 67)
    compiled = torch.compile(module, fullgraph=True)
    for eager, traced in zip(outcome(module, inputs), outcome(compiled, inputs), strict=True):
        assert torch.equal(eager, traced)


def test_C1_function_options_may_be_dynamic_numbers(loss):
    """Floats passed through a compiled function become symbols under dynamic shapes."""
    loss.needs()
    torch._dynamo.reset()
    inputs = loss.inputs(8, 67)

    def step(input, weight, target, smoothing):
        backend = loss.row.backend
        if weight is None:
            return liger.liger_cross_entropy(input, target, label_smoothing=smoothing, backend=backend)
        return liger.liger_fused_linear_cross_entropy(input, weight, target, label_smoothing=smoothing, backend=backend)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for smoothing in (0.1, 0.2):
        given = (inputs.input, inputs.weight, inputs.target, smoothing)
        assert torch.equal(compiled(*given), step(*given))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(loss, reduction):
    """Schema, fake and gradient of the operators agree with what they do."""
    loss.needs()
    leaves = loss.inputs(6, 37).leaves()
    needs = Needs(True, loss.fused, False)
    dtype = leaves.input.dtype
    in_backward = reduction == "none" or not loss.fused
    recipe = Recipe(CrossEntropyOptions(reduction=reduction), needs, dtype, dtype, in_backward, loss.row.backend)
    call = Call(leaves.input, leaves.target, leaves.weight, None, None, recipe)
    text, numbers = recipe.encode()
    torch.library.opcheck(operators.loss, (*call.tensors, text, *numbers))


def test_recipes_survive_their_text():
    options = CrossEntropyOptions(**EXTRAS, reduction="sum", accum_dtype=torch.float32, chunk_size=7, ignore_index=-1)
    recipe = Recipe(options, Needs(True, False, True), torch.bfloat16, torch.float32, True, None)
    text, numbers = recipe.encode()
    assert Recipe.decode(text, *numbers) == recipe


def test_operators_take_the_numbers_in_their_order():
    """They are told by their places alone."""
    for operator in (operators.loss, operators.loss_gradients):
        names = [argument.name for argument in operator._opoverload._schema.arguments]
        assert tuple(names[-len(NUMBERS) :]) == NUMBERS


@pytest.mark.parametrize("options", [{}, EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sizes_without_values(loss, reduction, options):
    """As those who estimate memory run a model: shapes and dtypes are those of a call with values."""
    loss.needs()
    inputs = loss.inputs(12, 67)
    module = module_of(loss, reduction=reduction, **options)
    real = outcome(module, inputs)
    with FakeTensorMode() as mode:
        given = {of.name: getattr(inputs, of.name) for of in fields(inputs)}
        fakes = {name: mode.from_tensor(tensor) for name, tensor in given.items() if tensor is not None}
        sized = outcome(module, replace(inputs, **fakes))
    for made, fake in zip(real, sized, strict=True):
        assert isinstance(fake, FakeTensor)
        assert (made.shape, made.dtype, made.device) == (fake.shape, fake.dtype, fake.device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_place": True}, "in_place must be False under torch.compile and with fake tensors"),
        ({"backend": "nonsense"}, "backend must be one of"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_sizes_of_what_no_graph_can_hold(options, message):
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        liger.liger_cross_entropy(torch.randn(12, 67), torch.zeros(12, dtype=torch.int64), **options)


def test_a_bad_call_is_refused_under_compile_too(loss):
    loss.needs()
    torch._dynamo.reset()
    inputs = loss.inputs(8, 67)
    compiled = torch.compile(module_of(loss), fullgraph=True, backend="aot_eager")
    given = (inputs.weight, inputs.input, inputs.target[:3]) if loss.fused else (inputs.input, inputs.target[:3])
    with pytest.raises(Exception, match="target must have input's shape"):
        compiled(*given)


def test_in_place_is_refused_under_compile(ce):
    """A traced graph may not overwrite its inputs."""
    ce.needs(in_place=True)
    torch._dynamo.reset()
    inputs = ce.inputs(8, 67)
    compiled = torch.compile(module_of(ce, in_place=True), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"in_place must be False under torch\.compile"):
        compiled(inputs.input.requires_grad_(), inputs.target)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo asks of tensors between graphs
def test_in_place_runs_eagerly_where_a_graph_may_break(ce):
    """Dynamo keeps out of the whole call: it would trace kernels' launches, and an interpreter of theirs."""
    ce.needs(in_place=True)
    torch._dynamo.reset()
    inputs = ce.inputs(8, 67)
    graphs = []

    def step(x, target):
        return liger.liger_cross_entropy(x * 2, target, in_place=True, backend=ce.row.backend) * 3

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    x, other = (inputs.input.clone().requires_grad_() for _ in range(2))
    loss = torch.compile(step, backend=count)(x, inputs.target)
    loss.backward()
    expected = step(other, inputs.target)
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(x.grad, other.grad)
    assert len(graphs) == 2  # what is before the loss, and what is after


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_A13_a_traced_composition_gives_no_partial_hessian(loss, compiler):
    loss.needs()
    torch._dynamo.reset()
    leaves = loss.inputs(6, 37).leaves()
    given = (leaves.weight, leaves.input, leaves.target) if loss.fused else (leaves.input, leaves.target)
    compiled = torch.compile(module_of(loss), fullgraph=True, backend=compiler)
    (first,) = torch.autograd.grad(compiled(*given) ** 2, leaves.input, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|no autograd formula"):
        torch.autograd.grad(first.sum(), leaves.input)


def test_a_graph_exported_without_gradients_is_not_trained(loss):
    loss.needs()
    leaves = loss.inputs(6, 37).leaves()
    given = (leaves.weight, leaves.input, leaves.target) if loss.fused else (leaves.input, leaves.target)
    with torch.no_grad():
        module = torch.export.export(module_of(loss), given).module()
    with pytest.raises(RuntimeError, match="traced without a gradient of input"):
        module(*given).backward()


def test_export_holds_the_operator(loss):
    loss.needs()
    inputs = loss.inputs(8, 67)
    given = (inputs.weight, inputs.input, inputs.target) if loss.fused else (inputs.input, inputs.target)
    with torch.no_grad():
        module = module_of(loss)
        exported = torch.export.export(module, given)
        assert "liger.loss" in str(exported.graph)
        assert torch.equal(exported.module()(*given), module(*given))


@pytest.fixture
def sync_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, EXTRAS], ids=["plain", "extras"])
def test_C5_cross_entropy_never_waits(reduction, options, sync_is_an_error):
    logits = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.arange(64, device="cuda")
    output = liger.liger_cross_entropy(logits, target, reduction=reduction, backend="triton", **options)
    (output if isinstance(output, torch.Tensor) else output.loss).sum().backward()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("ahead", [0, 8])
def test_C5_the_fused_loss_waits_only_where_it_may(backend, ahead, reduction, monkeypatch):
    """Where waiting is an error every row is projected; elsewhere one wait tells which rows are."""
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.arange(64, device="cuda")
    target[:48] = -100

    wait, events = torch.cuda.Event.synchronize, []
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: events.append(event) or wait(event))

    def step():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with projected_ahead(ahead):
                loss = liger.liger_fused_linear_cross_entropy(x, weight, target, reduction=reduction, backend=backend)
                gradients = torch.autograd.grad(loss.sum(), (x, weight))
        waits = ["called a synchronizing" in str(warning.message) for warning in caught]
        return (loss, *gradients), sum(waits)

    try:
        torch.cuda.set_sync_debug_mode("error")
        without, waits = step()
        assert waits == len(events) == 0
        torch.cuda.set_sync_debug_mode("warn")
        waiting, waits = step()
        # Where there is work meanwhile, the host waits for an event and not for the stream. torch looks at the targets as well.
        assert len(events) == bool(ahead)
        assert waits == (not ahead) or backend == "torch"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, expected in zip(without, waiting, strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6 * expected.abs().max().item())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # warm-up ran on a side stream
@pytest.mark.parametrize("fused", [False, True], ids=["ce", "flce"])
def test_C5_a_captured_step_replays_with_other_targets_and_counts(fused):
    """Nothing of the captured call's targets, their number included, is baked into the graph."""
    rows, hidden, vocab = 64, 32, 1000
    x = torch.randn(rows, hidden if fused else vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocab, (rows,), device="cuda")

    def step():
        if fused:
            return liger.liger_fused_linear_cross_entropy(x, weight, target, backend="triton")
        return liger.liger_cross_entropy(x, target, backend="triton")

    leaves = (x, weight) if fused else (x,)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(step(), leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
        gradients = torch.autograd.grad(loss, leaves)
    for ignored in (0, 1, 40, rows):
        with torch.no_grad():
            x.normal_()
            target.random_(vocab)
            target[:ignored] = -100
        graph.replay()
        # Eager calls may leave ignored rows out of their GEMMs, whose results then differ in their last bits.
        wanted = step()
        torch.testing.assert_close(loss, wanted, rtol=2**-7, atol=0)
        for got, expected in zip(gradients, torch.autograd.grad(wanted, leaves), strict=True):
            torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6 * expected.abs().max().item())
            assert expected.any() == (ignored < rows)


@pytest.mark.gpu
def test_C6_one_compilation_for_every_count():
    from liger.backends.triton import kernels

    logits = torch.randn(64, 777, device="cuda", requires_grad=True)
    target = torch.arange(64, device="cuda")
    compilations = []
    for valid in (64, 1, 2, 16, 17, 32):
        target[valid:] = -100
        liger.liger_cross_entropy(logits, target, backend="triton").backward()
        caches = kernels.rows_kernel.device_caches
        compilations.append(sum(len(cache[0]) for cache in caches.values()))
    assert len(set(compilations)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_C6_one_compilation_wherever_chunks_and_targets_begin(reduction):
    """Rows' numbers lie at any address: only that of the logits themselves may make another kernel."""
    from liger.backends.triton import kernels

    x, weight = (torch.randn(rows, 32, device="cuda", requires_grad=True) for rows in (64, 777))
    targets = torch.arange(70, device="cuda")
    compilations = []
    for start, chunk_size in ((0, 64), (0, 16), (1, 7), (2, 6), (3, 33)):
        loss = liger.liger_fused_linear_cross_entropy(
            x, weight, targets[start : start + 64], chunk_size=chunk_size, reduction=reduction, return_z_loss=True,
            return_predicted_tokens=True, backend="triton",
        ).loss  # fmt: skip
        loss.sum().backward()
        found = (kernels.rows_kernel, kernels.row_grad_kernel)
        compilations.append(sum(len(cache[0]) for kernel in found for cache in kernel.device_caches.values()))
    assert len(set(compilations)) == 1
