"""The lives of graphs: calls, evaluations and backwards of several losses, in any order that a caller may think of."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from liger.testing import Inputs

ROWS, VOCAB, HIDDEN = 5, 13, 4
FACTORS = (1.0, 1.0, 1.0, 3.0, -0.5, 0.0)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own tracing


@dataclass
class Life:
    """One graph, and what its gradients have to be by now."""

    leaves: Inputs
    loss: torch.Tensor
    unit: list[torch.Tensor]
    """Gradients of each row's loss, (N, ...) per leaf; of the whole loss, (1, ...)."""
    consumed: bool
    """Whether only factors of 1 can be followed by another backward."""
    single: bool
    """Whether a second backward is an error."""
    kept: list[torch.Tensor]
    """What the leaves held at the call."""
    factors: torch.Tensor
    """Of each row, or of the whole loss: the sum of all upstream gradients so far."""
    ended: bool = False
    used: bool = False
    scaled: bool = False
    trained: list[torch.Tensor] = field(default_factory=list)


class Lives(RuleBasedStateMachine):
    """Losses of one implementation, none of which may disturb another."""

    def __init__(self, subject):
        super().__init__()
        self.subject = subject
        self.seeds = itertools.count()
        self.lives: list[Life] = []

    def inputs(self):
        return self.subject.inputs(ROWS, VOCAB, HIDDEN, dtype=self.subject.finest, ignored=0.2, seed=next(self.seeds))

    @rule(
        reduction=st.sampled_from(("mean", "sum", "none")),
        in_place=st.booleans(),
        compiled=st.booleans(),
        softcap=st.sampled_from((None, 4.0)),
        extras=st.booleans(),
    )
    @precondition(lambda self: len(self.lives) < 4)
    def call(self, reduction, in_place, compiled, softcap, extras):
        in_place = in_place and not self.subject.reasons(in_place=True)
        compiled = compiled and not in_place and not self.subject.interpreted
        inputs = self.inputs()
        options = {"reduction": reduction, "softcap": softcap}
        unit = self._unit_gradients(inputs, options)
        leaves = inputs.leaves()
        given = replace(leaves, input=leaves.input * 1) if in_place else leaves
        if in_place:
            options["in_place"] = True
        if extras:
            options |= {"return_z_loss": True, "return_predicted_tokens": True}
        call = torch.compile(self.subject, backend="aot_eager") if compiled else self.subject
        output = call(given, **options)
        loss = output.loss if extras else output
        trained = [t for t in (leaves.input, leaves.weight) if t is not None]
        consumed = self.subject.row.consumes_saved and reduction != "none" and not compiled
        kept = [t.detach().clone() for t in trained]
        factors = torch.zeros(loss.numel(), dtype=torch.float64, device=self.subject.device)
        self.lives.append(Life(leaves, loss, unit, consumed, in_place, kept, factors, trained=trained))

    @rule(options=st.sampled_from(({}, {"reduction": "none"}, {"softcap": 2.0})))
    def evaluate(self, options):
        """Without gradients, by the way."""
        inputs = self.inputs()
        before = inputs.input.clone()
        with torch.no_grad():
            loss = self.subject(inputs, **options)
        assert not loss.requires_grad
        assert torch.equal(inputs.input, before)

    @rule(
        which=st.integers(0, 3),
        factor=st.sampled_from(FACTORS),
        retain=st.booleans(),
        rows=st.sets(st.integers(0, ROWS - 1)),
    )
    @precondition(lambda self: self.lives)
    def backward(self, which, factor, retain, rows):
        life = self.lives[which % len(self.lives)]
        upstream = torch.full_like(life.loss, factor)
        if life.loss.ndim:
            upstream[[row for row in range(ROWS) if row not in rows]] = 0
        fails = life.ended or (life.used and (life.single or (life.consumed and life.scaled)))
        if fails:
            with pytest.raises(RuntimeError):
                life.loss.backward(upstream, retain_graph=retain)
            return
        life.loss.backward(upstream, retain_graph=retain)
        life.factors += upstream.double().flatten()
        life.used, life.ended = True, not retain
        life.scaled = life.scaled or factor != 1

    @rule(which=st.integers(0, 3))
    @precondition(lambda self: self.lives)
    def forget(self, which):
        self.lives.pop(which % len(self.lives))

    @invariant()
    def gradients_are_what_was_asked_for(self):
        for life in self.lives:
            for leaf, unit, kept in zip(life.trained, life.unit, life.kept, strict=True):
                assert torch.equal(leaf.detach(), kept), "a call changed its caller's tensor"
                if not life.used:
                    assert leaf.grad is None
                    continue
                wanted = torch.tensordot(life.factors, unit.double(), 1)
                # A few sums and scalings of gradients that are themselves a few roundings off.
                bound = 64 * torch.finfo(leaf.dtype).eps * unit.abs().sum(0).max().item() * 4 + 1e-300
                assert (leaf.grad.double() - wanted).abs().max() <= bound * max(1.0, life.factors.abs().max().item())

    def _unit_gradients(self, inputs, options):
        """By the oracle in float64: for each row of "none", of the whole loss otherwise."""
        rows = ROWS if options["reduction"] == "none" else 1
        per_row = []
        for row in range(rows):
            upstream = None
            if options["reduction"] == "none":
                upstream = torch.zeros(ROWS, dtype=torch.float64, device=self.subject.device)
                upstream[row] = 1
            found = self.subject.expected(inputs, upstream=upstream, **options)[0].outcome
            per_row.append([t for t in (found.input, found.weight) if t is not None])
        return [torch.stack(parts).double() for parts in zip(*per_row, strict=True)]


def test_graphs_live_and_end_independently(loss):
    torch._dynamo.reset()
    examples, steps = (3, 6) if loss.interpreted else (settings().max_examples // 4, 20)
    chosen = settings(max_examples=examples, stateful_step_count=steps, phases=[Phase.generate])
    with torch._functorch.config.patch(donated_buffer=False):  # else torch itself refuses to retain a compiled graph
        run_state_machine_as_test(lambda: Lives(loss), settings=chosen)
    torch._dynamo.reset()
