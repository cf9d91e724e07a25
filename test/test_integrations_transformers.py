"""Transformers models train the same with the patch as without it, whatever their heads and losses are like."""

import contextlib
import copy
import csv
import gc
import io
import pickle
import subprocess
import sys
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("transformers", reason="the transformers extra is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

import tiny_models  # noqa: E402
import transformers  # noqa: E402
from tiny_models import batch, build, difference, step  # noqa: E402

from liger.integrations import deferred  # noqa: E402
from liger.integrations.transformers import UNLABELLED, Handle, patch, report  # noqa: E402

transformers.logging.set_verbosity_error()

CLOSE = 1e-4
"""`difference`: float32 rounding, amplified on the way back through a model (the largest seen is 1e-5; what is wrong in a
loss, a scale or a divisor shows in the first digit)."""
VERDICTS = {row["class"]: row for row in csv.DictReader(io.StringIO(tiny_models.DATA.read_text("utf-8")))}
ITEMS = torch.tensor(23)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("LIGER_BACKEND", "torch")  # not the interpreter, whose kernels have tests of their own
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def llama():
    return build("LlamaForCausalLM")


@pytest.fixture
def calls(monkeypatch):
    """The options of every fused call."""
    seen, fused = [], deferred.liger_fused_linear_cross_entropy

    def spy(*args, **options):
        seen.append(options)
        return fused(*args, **options)

    monkeypatch.setattr(deferred, "liger_fused_linear_cross_entropy", spy)
    return seen


def compare(model, *, inputs=None, status="fused", **options):
    """The report, after a step with the patch was found to equal one without."""
    inputs = inputs or batch(model)
    options = {"num_items_in_batch": ITEMS} | options
    plain = step(model, inputs, **options)
    with patch(model):
        assert difference(plain, step(model, inputs, **options)) <= CLOSE
        found = report(model)
    assert found.status == status, found
    assert bool(found.fused) == (status == "fused")
    return found


# Every class.


@pytest.mark.parametrize("name", tiny_models.names())
def test_every_class_trains_the_same(name):
    """And what became of its logits is what the documentation's table says (`python test/tiny_models.py` writes it)."""
    found = tiny_models.verdict(name)
    assert found.off <= CLOSE
    assert found.row == VERDICTS[name]


def test_well_over_130_classes_are_fused():
    assert list(VERDICTS) == tiny_models.names()
    assert sum(row["status"] == "fused" for row in VERDICTS.values()) > 150


# Scales and caps.


@pytest.mark.parametrize(
    ("name", "changes", "scale", "cap"),
    [
        ("LlamaForCausalLM", {}, 1.0, None),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 3.0}, 1.0, 3.0),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 3.0}, 1.0, 3.0),
        ("CohereForCausalLM", {"logit_scale": 0.0625}, 0.0625, None),
        ("Cohere2ForCausalLM", {"logit_scale": 0.25}, 0.25, None),
        ("GraniteForCausalLM", {"logits_scaling": 8.0}, 0.125, None),
        ("FalconH1ForCausalLM", {"lm_head_multiplier": 0.5}, 0.5, None),
        ("RecurrentGemmaForCausalLM", {"logits_soft_cap": 4.0}, 1.0, 4.0),
        ("xLSTMForCausalLM", {"output_logit_soft_cap": 4.0}, 1.0, 4.0),
    ],
)
def test_scale_and_softcap_reach_the_loss(calls, name, changes, scale, cap):
    model = build(name, **changes)
    compare(model)
    assert [(call["logit_scale"], call["softcap"]) for call in calls] == [(pytest.approx(scale, rel=1e-12), cap)]
    assert [call["num_items"] for call in calls] == [ITEMS]


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "OlmoeForCausalLM"])
def test_auxiliary_losses_of_experts_stay(name):
    model = build(name, output_router_logits=True, router_aux_loss_coef=10.0)
    compare(model)
    inputs = batch(model)
    with patch(model):
        both = model(**inputs)
        alone = model(**inputs, output_router_logits=False)
    assert both.aux_loss > 0
    assert both.loss.item() > alone.loss.item() + 1


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tied):
    model = build("LlamaForCausalLM", tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    compare(model)


@pytest.mark.parametrize("name", ["GPTJForCausalLM", "BertLMHeadModel", "PhiForCausalLM"])
def test_heads_with_a_bias(name):
    model = build(name)
    assert model.get_output_embeddings().bias is not None
    compare(model)


class Scaled(transformers.LlamaForCausalLM):
    """A head with a scale of its own that learns, as a model from outside may have."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden) * self.scale
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return {"loss": loss, "logits": logits}


def test_a_learned_scale_keeps_its_gradient():
    model = Scaled(tiny_models.tiny_config(transformers.LlamaForCausalLM)).train()
    plain = step(model, batch(model))
    assert plain.gradients["scale"] != 0
    compare(model, status="materialised")
    with patch(model):
        step(model, batch(model))
        assert report(model).reason == "a factor that is no number"


# What a caller may ask for.


@pytest.mark.parametrize("items", [None, 23, 23.0, torch.tensor(23), torch.tensor([23]), torch.tensor(23.5)], ids=repr)
def test_numbers_of_items(llama, items):
    compare(llama, num_items_in_batch=items)


@pytest.mark.parametrize("items", [0, torch.tensor(-3), torch.tensor([3, 4])], ids=repr)
def test_what_is_no_number_of_items_takes_the_models_own_path(llama, items):
    inputs = batch(llama)
    with patch(llama):
        got = llama(**inputs, num_items_in_batch=items).loss
    assert torch.equal(got, llama(**inputs, num_items_in_batch=items).loss)


def test_ignore_index_and_shifted_labels(llama):
    inputs = batch(llama)
    every = inputs | {"labels": inputs["input_ids"]}
    compare(llama, inputs=every, ignore_index=int(inputs["input_ids"][0, 3]))
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    got = compare(llama, inputs=inputs | {"shift_labels": shifted, "labels": shifted})
    assert got.fused == 1


def test_nothing_valid_is_zero_where_the_models_own_loss_is_nan(llama):
    inputs = batch(llama)
    inputs["labels"][:] = -100
    assert llama(**inputs).loss.isnan()
    with patch(llama):
        found = step(llama, inputs)
    assert found.loss == 0
    assert not any(gradient.any() for gradient in found.gradients.values())


def test_a_model_that_changes_its_logits_in_place():
    """Chameleon never gives a token of an image: it sets those columns before its loss."""
    config = transformers.ChameleonConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocabulary_map={"<image>": 4, "IMGIMGAZ": 5, "IMGIMGBZ": 6},
        vq_config={
            "embed_dim": 4, "num_embeddings": 8, "latent_channels": 4, "resolution": 8, "base_channels": 32,
            "channel_multiplier": [1], "num_res_blocks": 1,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ChameleonForConditionalGeneration(config).train()
    ids = torch.randint(7, 40, (2, 6))
    with torch.no_grad():
        model.lm_head.weight[5:7] = 50  # what is masked would weigh
    inputs = {"input_ids": ids, "labels": ids}
    plain = step(model, inputs)
    with patch(model):
        found = step(model, inputs)
        assert report(model).materialised == {"setitem": 1}
    assert difference(plain, found) <= CLOSE


def test_logits_to_keep(llama):
    """With as many shifted labels it is fused; otherwise the error is the model's own."""
    inputs = batch(llama)
    kept = F.pad(inputs["labels"], (0, 1), value=-100)[:, -3:].contiguous()
    compare(llama, inputs=inputs | {"labels": kept, "shift_labels": kept, "logits_to_keep": 3})
    for patched in (False, True):
        handle = patch(llama) if patched else None
        with pytest.raises(ValueError, match="Expected input batch_size"):
            llama(**inputs, logits_to_keep=3)
    handle.remove()


def test_logits_are_absent_in_training_and_there_in_evaluation(llama):
    inputs = batch(llama)
    with patch(llama):
        output = llama(**inputs)
        assert output.logits is None
        assert "logits" not in output
        assert llama(**inputs, return_dict=False)[1] is None
        assert llama(input_ids=inputs["input_ids"]).logits.shape == (2, 8, tiny_models.VOCAB)
        llama.eval()
        assert llama(**inputs).logits.shape == (2, 8, tiny_models.VOCAB)
        assert report(llama).fused == 2
    with patch(llama, evaluate=True), torch.no_grad():
        fused = llama(**inputs)
        assert fused.logits is None
    torch.testing.assert_close(fused.loss, llama(**inputs).loss)


def test_a_vocabulary_that_is_not_the_heads_is_the_models_own_error(llama):
    llama.config.vocab_size -= 1
    for context in (contextlib.nullcontext(), patch(llama)):
        with context, pytest.raises(RuntimeError, match="shape"):
            llama(**batch(llama))


def test_labels_by_position(llama):
    inputs = batch(llama)
    place = list(transformers.LlamaForCausalLM.forward.__wrapped__.__code__.co_varnames).index("labels") - 1
    arguments = [inputs["input_ids"], *[None] * (place - 1), inputs["labels"]]
    with patch(llama):
        assert llama(*arguments).logits is None


def test_a_loss_of_the_users_own(llama):
    """One that calls torch's cross entropy is fused too, any other gets logits."""

    def entropy(logits, labels, vocab_size, **kwargs):
        shifted, target = logits[..., :-1, :].contiguous(), labels[..., 1:].reshape(-1)
        return F.cross_entropy(shifted.view(-1, vocab_size).float(), target, label_smoothing=0.1)

    def other(logits, labels, vocab_size, **kwargs):
        return torch.logsumexp(logits, -1).mean()

    for function, status in ((entropy, "fused"), (other, "materialised")):
        llama.loss_function = function
        found = compare(llama, status=status)
        assert found.materialised == ({} if status == "fused" else {"logsumexp": 1})
        assert llama.loss_function is function


def test_a_loss_function_set_later_is_the_one_that_counts(llama):
    inputs = batch(llama)
    handle = patch(llama)
    llama.loss_function = lambda logits, labels, vocab_size, **kwargs: (logits * 0).sum() + 7
    assert llama(**inputs).loss == 7
    assert report(llama).materialised == {"a factor of 0": 1}
    with pytest.raises(ValueError, match="must not be patched already"):
        patch(llama)
    handle.remove()
    assert llama(**inputs).loss == 7


def test_a_backend_by_name(llama):
    with patch(llama, backend="torch"):
        assert step(llama, batch(llama)).output.logits is None
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*, got 'cuda'"):
        patch(llama, backend="cuda")
    with pytest.raises(ValueError, match=r"evaluate must be True or False, got 'yes'"):
        patch(llama, evaluate="yes")


def test_a_patch_tells_what_it_did(llama):
    with patch(llama) as handle:
        assert str(report(llama)) == "unused: it was not called with labels in training mode\n  fused: none so far"
        step(llama, batch(llama))
        assert str(report(llama)) == "fused\n  fused: 1"
        assert repr(handle) == "<patch of LlamaForCausalLM, 1 losses fused so far>"
    assert repr(handle) == "<removed patch of LlamaForCausalLM, 1 losses fused so far>"


def test_a_loop_that_takes_its_loss_of_logits_is_told_so(llama):
    """In training, that is: who generates, scores or evaluates has no labels, and that is no fault."""
    inputs = batch(llama)
    labels = inputs.pop("labels")

    def loss():
        return F.cross_entropy(llama(**inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    with patch(llama):
        with torch.no_grad():
            loss()
        llama.generate(inputs["input_ids"], max_new_tokens=2, do_sample=False)
        llama.eval()
        loss().backward()
        llama(**inputs, labels=labels)
        assert (report(llama).status, report(llama).materialised) == ("unused", {})
        llama.train()
        for _ in range(3):
            loss().backward()
        assert str(report(llama)) == (f"materialised: {UNLABELLED}\n  fused: none so far\n  materialised: 3 ({UNLABELLED})")
        step(llama, inputs | {"labels": labels})
        assert (report(llama).status, report(llama).materialised) == ("fused", {UNLABELLED: 3})
    with patch(llama, evaluate=True):
        assert report(llama).reason == "it was not called with labels"


def test_a_compiled_loop_without_labels_is_not_compiled_again(llama):
    torch._dynamo.reset()
    inputs, graphs = batch(llama), []
    inputs.pop("labels")
    with patch(llama):
        compiled = torch.compile(llama, backend=lambda graph, _: graphs.append(graph) or graph.forward)
        for _ in range(3):
            compiled(**inputs)
        assert len(graphs) == 1
        assert report(llama).reason == "it was not called with labels in training mode"


# What may have been done to a head.


def test_lora_beside_the_head_is_fused():
    peft = pytest.importorskip("peft")
    model = build("LlamaForCausalLM")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    plain = step(wrapped, batch(model), num_items_in_batch=ITEMS)
    with patch(wrapped):
        assert difference(plain, step(wrapped, batch(model), num_items_in_batch=ITEMS)) <= CLOSE
        assert report(wrapped).status == "fused"
    assert any("lora_A" in name for name in plain.gradients)


@pytest.mark.parametrize("first", ["patch", "adapter"])
@pytest.mark.parametrize("kind", ["lora", "saved"])
def test_an_adapted_head_keeps_its_gradient(first, kind):
    peft = pytest.importorskip("peft")
    options = {
        "lora": {"target_modules": ["lm_head"]},
        "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    }[kind]

    def adapted(patched):
        torch.manual_seed(0)
        model = build("LlamaForCausalLM")
        if patched and first == "patch":
            patch(model)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, lora_dropout=0.0, **options))
        if patched and first == "adapter":
            patch(wrapped)
        return wrapped, step(wrapped, batch(model), num_items_in_batch=ITEMS)

    (_, plain), (model, patched) = adapted(False), adapted(True)
    assert any("lm_head" in name for name in plain.gradients)
    assert difference(plain, patched) <= CLOSE
    found = report(model)
    assert found.status == "materialised"
    assert "peft" in found.reason


@pytest.mark.parametrize("kind", ["forward_hook", "pre_hook", "full_backward_hook"])
def test_a_head_with_hooks_gets_real_logits(llama, kind):
    shapes = []
    register = {
        "forward_hook": llama.lm_head.register_forward_hook,
        "pre_hook": llama.lm_head.register_forward_pre_hook,
        "full_backward_hook": llama.lm_head.register_full_backward_hook,
    }[kind]
    register(lambda module, *rest: shapes.append(type(rest[-1])))
    assert compare(llama, status="materialised").reason == "the head has hooks"
    assert shapes


class OwnHead(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


class Quantised(torch.Tensor):
    pass


@pytest.mark.parametrize("what", ["class", "forward", "wrapped forward", "weight", "parametrised"])
def test_a_head_that_is_not_linear_is_left_alone(llama, what):
    head = llama.lm_head
    inputs, status, reason = batch(llama), "materialised", None
    if what == "class":
        head.__class__, reason = OwnHead, "the head is a test_integrations_transformers.OwnHead"
    elif what == "forward":
        head.forward = types.MethodType(lambda self, x: F.linear(x, self.weight * 0.5), head)
        reason = "the head's forward was replaced"
    elif what == "weight":
        head.weight = nn.Parameter(head.weight.detach().as_subclass(Quantised))
        reason = "the head's weight is a test_integrations_transformers.Quantised"
    elif what == "parametrised":  # its weight is what its parametrisation makes of it, gradient and all
        nn.utils.parametrizations.weight_norm(head)
        status = "fused"
    else:  # by someone, after the patch
        with patch(llama):
            inner = head.forward
            head.forward = lambda x: inner(x).clamp(max=1.0)
            wrapped = step(llama, inputs)
            assert report(llama).materialised == {"the head's forward was replaced": 1}
        head.forward = lambda x: F.linear(x, head.weight).clamp(max=1.0)
        assert difference(step(llama, inputs), wrapped) <= CLOSE
        return
    assert compare(llama, status=status).reason == reason


def test_device_maps_of_accelerate(llama):
    accelerate = pytest.importorskip("accelerate")
    for when in ("before", "after"):
        model = copy.deepcopy(llama)
        plain = step(model, batch(model))
        if when == "before":
            accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
            patch(model)
        else:
            patch(model)
            accelerate.hooks.attach_align_device_hook(model, execution_device="cpu")
        assert difference(plain, step(model, batch(model))) <= CLOSE
        assert report(model).status == "fused", report(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_offloaded_head_gets_real_logits(llama, when):
    accelerate = pytest.importorskip("accelerate")
    inputs = batch(llama)
    wanted = llama(**inputs).loss
    if when == "before":
        accelerate.cpu_offload(llama, execution_device=torch.device("cpu"))
    with patch(llama):
        if when == "after":
            accelerate.cpu_offload(llama, execution_device=torch.device("cpu"))
        assert torch.equal(llama(**inputs).loss, wanted)
        assert report(llama).status == "materialised"


def test_a_patch_keeps_no_model_alive():
    model = build("LlamaForCausalLM")
    patch(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class Wrapper(nn.Module):
    """As FSDP's: an attribute that it lacks is its module's."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def test_what_is_wrapped_is_patched_inside(llama):
    wrapped = Wrapper(Wrapper(llama))
    with patch(wrapped) as handle:
        assert handle.model is llama
        assert wrapped(**batch(llama)).logits is None
        assert report(wrapped) == report(llama)


def test_models_that_cannot_be_patched(llama):
    for wrong, message in (
        (nn.Linear(2, 2), "got Linear: it has no loss_function"),
        (transformers.AutoModel.from_config(llama.config), r"get_output_embeddings\(\) is None"),
    ):
        with pytest.raises(ValueError, match=message):
            patch(wrong)
        assert report(wrong).status == "refused"
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got str"):
        patch("llama")
    assert (report(llama).status, report(llama).reason) == ("refused", "the model is not patched, but can be")
    with patch(llama), pytest.raises(ValueError, match="model must not be patched already"):
        patch(llama)


# What may be done to a patched model.


def test_a_removed_patch_leaves_nothing(llama):
    before = {name: dict(module.__dict__) for name, module in llama.named_modules()}
    handle = patch(llama)
    assert isinstance(handle, Handle)
    handle.remove()
    handle.remove()
    assert {name: dict(module.__dict__) for name, module in llama.named_modules()} == before


def test_wrappers_around_a_patch_survive_its_removal(llama):
    inputs = batch(llama)
    handle = patch(llama)
    inner = llama.forward
    llama.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    handle.remove()
    assert llama(**inputs).logits is not None
    with patch(llama):
        assert llama(**inputs).logits is None


def test_copies_and_pickles_are_not_patched(llama, tmp_path):
    inputs = batch(llama)
    plain = step(llama, inputs)
    with patch(llama):
        file = io.BytesIO()
        torch.save(llama, file)
        file.seek(0)
        copies = [copy.deepcopy(llama), pickle.loads(pickle.dumps(llama)), torch.load(file, weights_only=False)]
        llama.save_pretrained(tmp_path)
        copies.append(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train())
        with torch.no_grad():  # a copy that ran the original would show it
            llama.lm_head.weight.mul_(2)
        for other in copies:
            found = step(other, inputs)
            assert found.output.logits is not None
            assert difference(plain, found) == 0
            assert report(other).status == "refused"
            with patch(other):
                assert difference(plain, step(other, inputs)) <= CLOSE


def test_replicas_of_data_parallel_are_not_patched(llama):
    """Their methods would be bound to the original, on another device."""
    before = llama.loss_function
    with patch(llama):
        replica, head = llama._replicate_for_data_parallel(), llama.lm_head._replicate_for_data_parallel()
        assert replica.forward.__self__ is replica
        assert head.forward.__self__ is head
        assert replica.loss_function is before
        assert "forward" in llama.__dict__


def test_threads_do_not_see_each_other(llama):
    """One evaluates without labels while another is between its head and its loss."""
    inputs, seen = batch(llama), {}

    def pausing(logits, *args, **kwargs):
        other = threading.Thread(target=lambda: seen.update(logits=llama(input_ids=inputs["input_ids"]).logits))
        other.start()
        other.join()
        return F.cross_entropy(logits[:, :-1].reshape(-1, tiny_models.VOCAB), inputs["labels"][:, 1:].reshape(-1))

    llama.loss_function = pausing
    with patch(llama):
        assert llama(**inputs).logits is None
    assert isinstance(seen["logits"], torch.Tensor)


def test_an_error_in_the_model_leaves_no_trace(llama):
    with patch(llama):
        with pytest.raises(IndexError):
            llama(input_ids=torch.tensor([[10**6]]), labels=torch.tensor([[1]]))
        assert isinstance(llama.lm_head(torch.zeros(1, 32)), torch.Tensor)


def test_gradient_checkpointing(llama):
    llama.gradient_checkpointing_enable()
    compare(llama)


@pytest.mark.parametrize("wrapped", ["by autocast", "by accelerate"])
def test_autocast(llama, wrapped):
    """The loss is float32, and as near to float32's as torch's own under autocast."""
    inputs = batch(llama)
    truth = step(llama, inputs)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return step(llama, inputs)

    if wrapped == "by accelerate":
        accelerate = pytest.importorskip("accelerate")
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        with patch(llama):
            fused = step(accelerator.prepare(llama), inputs)
            assert report(llama).status == "fused"
        plain = step(llama, inputs)
    else:
        plain = run()
        with patch(llama):
            fused = run()
            assert report(llama).status == "fused"
    assert fused.output.logits is None
    assert fused.loss.dtype == plain.loss.dtype == torch.float32
    assert 0 < difference(truth, fused) <= 2 * difference(truth, plain)


def test_compiled_in_one_graph():
    llama = build("LlamaForCausalLM", num_hidden_layers=1)
    torch._dynamo.reset()
    with patch(llama):
        compiled = torch.compile(llama, backend="aot_eager", fullgraph=True)
        for seed in (0, 1):
            found = step(compiled, batch(llama, seed=seed), num_items_in_batch=ITEMS + seed)
            assert found.output.logits is None
            found.gradients = {name.removeprefix("_orig_mod."): grad for name, grad in found.gradients.items()}
            other = step(llama, batch(llama, seed=seed), num_items_in_batch=ITEMS + seed)
            assert difference(other, found) <= CLOSE
        assert report(compiled).fused == 4
    torch._dynamo.reset()


def test_compiled_with_real_logits():
    torch._dynamo.reset()
    config = tiny_models.tiny_config(transformers.LlamaForCausalLM)
    config.num_hidden_layers = 1
    model = Scaled(config).train()
    plain = step(model, batch(model))
    with patch(model):
        found = step(torch.compile(model, backend="aot_eager"), batch(model))
    found.gradients = {name.removeprefix("_orig_mod."): grad for name, grad in found.gradients.items()}
    assert difference(plain, found) <= CLOSE
    torch._dynamo.reset()


def test_ddp_and_fsdp2(tmp_path):
    """In a process group of one: the root's group holds the head until the loss is computed; a head on its own does not."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED, "utf-8")
    run = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["ddp", "fused", "root", "fused", "tied", "fused", "alone", "materialised"], run.stderr


SHARDED = f"""
import sys
sys.path[:0] = {sys.path!r}
import torch
from tiny_models import batch, build, difference, step
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from liger.integrations.transformers import patch, report

init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
for name in ("ddp", "root", "tied", "alone"):
    model = build("LlamaForCausalLM", tie_word_embeddings=name == "tied")
    plain = step(model, batch(model), num_items_in_batch=torch.tensor(23))
    wrapped = model
    if name == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        if name == "alone":
            fully_shard(model.lm_head)
        fully_shard(model)
    patch(wrapped)
    found = step(wrapped, batch(model), num_items_in_batch=torch.tensor(23))
    found.gradients = {{
        name.removeprefix("module."): grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in found.gradients.items()
    }}
    assert difference(plain, found) <= {CLOSE}, (name, difference(plain, found))
    print(name, report(model).status)
    assert name != "alone" or "not on the head" in report(model).reason
destroy_process_group()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_on_a_gpu_in_bfloat16(name, monkeypatch):
    """As near to the model in float32 as its own loss in bfloat16 is."""
    monkeypatch.delenv("LIGER_BACKEND")
    model = build(name).cuda()
    inputs = batch(model)  # the labels stay on the host, as under a device_map
    inputs["input_ids"], items = inputs["input_ids"].cuda(), ITEMS.cuda()
    truth = step(model, inputs, num_items_in_batch=items)
    model.bfloat16()
    plain = step(model, inputs, num_items_in_batch=items)
    with patch(model, backend="triton"):
        fused = step(model, inputs, num_items_in_batch=items)
        assert report(model).status == "fused"
    for found in (plain, fused):
        found.gradients = {key: value.float() for key, value in found.gradients.items()}
    assert 0 < difference(truth, fused) <= 2 * difference(truth, plain)


# The trainer.


class Uneven(torch.utils.data.Dataset):
    """Rows of which very different shares are masked."""

    def __len__(self):
        return 80

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 90, (12,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(1, 12, (), generator=generator))] = -100
        return {"input_ids": ids, "labels": labels}


def trained(tmp_path, *, patched, steps=20, compute_loss_func=None, **arguments):
    """(losses of a run, its trained parameters, the report)."""
    pytest.importorskip("accelerate")
    model = build("LlamaForCausalLM")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-3, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        seed=0, **arguments,
    )  # fmt: skip
    handle = patch(model) if patched else None
    trainer = transformers.Trainer(model, arguments, train_dataset=Uneven(), compute_loss_func=compute_loss_func)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = report(model)
    if handle:
        handle.remove()
    return losses, [parameter.detach() for parameter in model.parameters()], found


def test_trainer_for_twenty_steps(tmp_path):
    plain, plain_parameters, _ = trained(tmp_path, patched=False)
    fused, parameters, found = trained(tmp_path, patched=True)
    assert (len(fused), found.fused, found.materialised) == (20, 40, {})
    assert plain[0] != pytest.approx(plain[-1], rel=1e-2)
    assert fused == pytest.approx(plain, rel=1e-4)
    for one, other in zip(plain_parameters, parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)  # a fifth of one step of Adam


def own_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].reshape(-1, tiny_models.VOCAB)
    return F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("how", ["label smoothing", "own loss"])
def test_trainers_own_losses_take_their_path(tmp_path, how):
    options = {"label_smoothing_factor": 0.1} if how == "label smoothing" else {"compute_loss_func": own_loss}
    plain, *_ = trained(tmp_path, patched=False, steps=2, **options)
    patched, _, found = trained(tmp_path, patched=True, steps=2, **options)
    assert patched == plain
    assert (found.status, found.reason, found.fused) == ("materialised", UNLABELLED, 0)
    assert found.materialised == {UNLABELLED: 4}


def test_trainer_evaluates_with_logits(tmp_path):
    pytest.importorskip("accelerate")
    model = build("LlamaForCausalLM")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True)
    shapes = []
    trainer = transformers.Trainer(
        model, arguments, eval_dataset=Uneven(), compute_metrics=lambda p: shapes.append(p.predictions.shape) or {"n": 1}
    )
    with patch(model):
        trainer.evaluate()
    assert shapes == [(80, 12, tiny_models.VOCAB)]
