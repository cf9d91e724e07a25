"""The training example: what is prompt and what is answer, the token pipeline, the cost measurement, and whole runs."""

import ast
import io
import math
import os
import random
import re
import subprocess
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_lm
from _lm.loss_cost import measure, peak_extra_bytes, unfused_loss
from _lm.model import ModelConfig, Transformer
from _lm.text import Corpus, InputError, Segment, load_corpus, prose_prompt_spans, segment_document, split_segments
from _lm.tokens import (
    END_OF_TEXT,
    IGNORE_INDEX,
    Sequences,
    batches,
    encode,
    make_sequences,
    split_held_out,
    train_tokenizer,
    unigram_entropy,
)

SCRIPT = Path(train_lm.__file__).resolve()
SOURCE = '''\
#!/usr/bin/env python
"""Müdule docstring: 1 # 2."""
import os  # größe

URL = "http://x#y"  # not "the string"
"""A string in the middle is code."""

class Ä:
    r\'\'\'Raw
    # inside a docstring\'\'\'; x = "é"  # after
    async def f(self):
        ("joined" # between
         "docstring")
        return f"{self.x!r:>#4}"
    def g(self): "one line"
'''
PROMPTS = [
    "#!/usr/bin/env python",
    '"""Müdule docstring: 1 # 2."""',
    "# größe",
    '# not "the string"',
    "r'''Raw\n    # inside a docstring'''",
    "# after",
    '"joined" # between\n         "docstring"',
    '"one line"',
]
SMALL_RUN = [
    *("--vocab", "400", "--steps", "6", "--check-every", "3", "--batch", "2", "--seq", "32"),
    *("--dim", "16", "--layers", "1", "--heads", "2", "--backend", "torch"),
]


def joined(segments: tuple[Segment, ...]) -> str:
    return "".join(segment.text for segment in segments)


def prompts(segments: tuple[Segment, ...]) -> list[str]:
    return [segment.text for segment in segments if not segment.is_answer]


def small_source(functions: int) -> str:
    words = random.Random(0)
    return "\n".join(
        f'def function_{n}(x):\n    """Add {words.randrange(100)}."""\n    return x + {n}  # number {n}\n'
        for n in range(functions)
    )


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text(small_source(120), encoding="utf-8")
    return path


def test_python_prompts_are_the_comments_and_docstrings():
    segments = segment_document(SOURCE, is_python=True)
    assert joined(segments) == SOURCE
    assert prompts(segments) == PROMPTS


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A random module, and its comments and docstrings in order."""
    characters = st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"), exclude_characters="\"'\\")
    phrase = st.text(characters, max_size=8)
    expected: list[str] = []
    lines: list[str] = []

    def docstring(indent: str) -> None:
        quotes = draw(st.sampled_from(['"', '"""', "'''", 'r"""']))
        closing = quotes.lstrip("r")
        inner = "\n".join(draw(st.lists(phrase, min_size=1, max_size=3 if len(closing) == 3 else 1)))
        expected.append(f"{quotes}{inner}{closing}")
        lines.extend(f"{indent}{expected[-1]}".split("\n"))

    def statement(indent: str) -> None:
        code = draw(st.sampled_from(["x = 1", "y = '#'", "z = '''a # b'''", "f(x)", "ü = 'ü'", "'no docstring'", ""]))
        if draw(st.booleans()):
            expected.append(f"#{draw(phrase)}")
            code += f"  {expected[-1]}"
        lines.append(indent + code if code else "")

    if draw(st.booleans()):
        docstring("")
    lines.append("import os")
    for _ in range(draw(st.integers(0, 3))):
        lines.append(draw(st.sampled_from(["def f():", "class C:", "async def f():"])))
        docstring("    ")
        for _ in range(draw(st.integers(0, 3))):
            statement("    ")
        statement("")
    return "\n".join(lines), expected


@given(programs())
def test_python_prompts_of_random_modules(program: tuple[str, list[str]]):
    source, expected = program
    segments = segment_document(source, is_python=True)
    assert joined(segments) == source
    assert prompts(segments) == expected


def without_docstrings(tree: ast.Module) -> str:
    """The syntax tree as text, every docstring replaced by an ellipsis."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body[0] = ast.Expr(ast.Constant(...))
    return ast.dump(tree)


@pytest.mark.parametrize("name", ["argparse", "ast", "dataclasses", "difflib", "inspect", "this", "tokenize", "typing"])
def test_answers_of_real_modules_are_the_program(name: str):
    source = (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text(encoding="utf-8")
    segments = segment_document(source, is_python=True)
    assert joined(segments) == source

    kept = [segment.text if segment.is_answer else "" if segment.text.startswith("#") else "..." for segment in segments]
    program = "".join(kept)
    assert without_docstrings(ast.parse(program)) == without_docstrings(ast.parse(source))
    tokens = tokenize.generate_tokens(io.StringIO(program).readline)
    assert not [token for token in tokens if token.type == tokenize.COMMENT]


def test_source_that_does_not_parse_is_prose():
    segments = segment_document("print 'one'  # two three\n", is_python=True)
    assert prompts(segments) == ["print 'one'"]


@given(st.text(st.sampled_from("ab \n\t\r\x0c\u00a0\u2028"), max_size=60) | st.text(max_size=60))
def test_prose_prompts_are_the_first_halves_of_paragraphs(text: str):
    spans = prose_prompt_spans(text)
    segments = split_segments(text, spans)
    assert joined(segments) == text
    paragraphs = [paragraph.split() for paragraph in re.split(r"\n\s*\n", text)]
    halves = [words[: len(words) // 2] for words in paragraphs]
    assert [prompt.split() for prompt in prompts(segments)] == [words for words in halves if words]


def test_load_corpus_reads_files_and_directories_alike(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one two", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_bytes("# -*- coding: latin-1 -*-\r\nx = 'é'\r\n".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("secret", encoding="utf-8")

    corpus = load_corpus([tmp_path], 1000, seed=0)
    assert {joined(document) for document in corpus.documents} == {"one two", "# -*- coding: latin-1 -*-\nx = 'é'\n"}
    assert corpus.skipped == 1
    assert load_corpus([tmp_path, tmp_path / "a.txt"], 1000, seed=0).documents == corpus.documents
    assert load_corpus([tmp_path / "a.txt"], 3, seed=0).characters == 3


def test_standard_library_order_follows_the_seed():
    first, again, other = (load_corpus([], 50_000, seed).documents for seed in (0, 0, 1))
    assert first == again != other


@pytest.fixture(scope="module")
def small_corpus() -> Corpus:
    documents = (SOURCE, small_source(40), f"prose spells out {END_OF_TEXT} and 💡")
    return Corpus(tuple(segment_document(text, is_python=n < 2) for n, text in enumerate(documents)), skipped=0)


def test_tokens_give_back_the_text_and_know_prompt_from_answer(small_corpus: Corpus):
    tokenizer = train_tokenizer(small_corpus, 300)
    assert tokenizer.get_vocab_size() == 300
    stream = encode(small_corpus, tokenizer)
    whole = [joined(document) for document in small_corpus.documents]
    assert tokenizer.decode(stream.ids.tolist(), skip_special_tokens=False) == END_OF_TEXT.join([*whole, ""])
    answers = ["".join(s.text for s in document if s.is_answer) for document in small_corpus.documents]
    kept = stream.ids[stream.is_answer].tolist()
    assert tokenizer.decode(kept, skip_special_tokens=False) == END_OF_TEXT.join([*answers, ""])


def test_tokenizer_is_the_same_every_time(small_corpus: Corpus):
    first, second = (train_tokenizer(small_corpus, 400).to_str() for _ in range(2))
    assert first == second


def test_targets_are_the_next_tokens_of_the_answer(small_corpus: Corpus):
    stream = encode(small_corpus, train_tokenizer(small_corpus, 300))
    sequences = make_sequences(stream, 16)
    inputs, targets = sequences.inputs.flatten(), sequences.targets.flatten()
    assert len(inputs) == (len(stream.ids) - 1) // 16 * 16
    assert torch.equal(inputs, stream.ids[: len(inputs)])
    following, is_answer = stream.ids[1 : len(inputs) + 1], stream.is_answer[1 : len(inputs) + 1]
    assert torch.equal(targets[is_answer], following[is_answer])
    assert (targets[~is_answer] == IGNORE_INDEX).all()
    assert 0 < sequences.labelled_share < 1


def numbered(count: int) -> Sequences:
    """Sequences of two tokens, told apart by their number."""
    numbers = torch.arange(2 * count).view(count, 2)
    return Sequences(numbers, numbers)


def test_held_out_text_is_not_trained_on():
    training, held_out = split_held_out(numbered(200), batch=8, max_held_out=4)
    assert training.inputs[:, 0].tolist() == list(range(0, 380, 2))
    assert held_out.inputs[:, 0].tolist() == [380, 386, 392, 398]


def test_too_little_text_says_how_much_is_needed():
    with pytest.raises(InputError, match="makes 8 sequences of 2 tokens, and a batch of 8 with one held out needs 9"):
        split_held_out(numbered(8), batch=8, max_held_out=4)
    unlabelled = Sequences(numbered(20).inputs, torch.full((20, 2), IGNORE_INDEX))
    with pytest.raises(InputError, match="all prompt"):
        split_held_out(unlabelled, batch=8, max_held_out=4)


def test_batches_visit_every_sequence_once_an_epoch():
    def epochs(seed: int) -> Iterator[int]:
        stream = batches(numbered(10), 5, torch.Generator().manual_seed(seed))
        for _ in range(4):
            inputs, targets = next(stream)
            assert torch.equal(inputs, targets)
            yield from inputs[:, 0].tolist()

    order = list(epochs(0))
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(0, 20, 2))
    assert order[:10] != order[10:]
    assert order == list(epochs(0)) != list(epochs(1))


def test_batches_without_a_label_are_left_out():
    """They have no mean loss: PyTorch's is NaN, this package's 0."""
    sequences = numbered(10)
    targets = torch.where(sequences.inputs < 4, sequences.targets, IGNORE_INDEX)
    stream = batches(Sequences(sequences.inputs, targets), 1, torch.Generator().manual_seed(0))
    assert sorted(int(next(stream)[0][0, 0]) for _ in range(6)) == [0, 0, 0, 2, 2, 2]


def test_unigram_entropy_of_known_frequencies():
    assert unigram_entropy(torch.arange(7).repeat(3)) == pytest.approx(math.log(7))
    assert unigram_entropy(torch.tensor([5, 5, 5])) == 0
    assert unigram_entropy(torch.tensor([0, 0, 3, 9])) == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize("tied", [False, True])
def test_model_sees_no_later_token(tied: bool):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocabulary=50, dim=16, layers=2, heads=2, max_length=12, tied=tied)).double()
    assert (model.head_weight is model.embedding.weight) == tied
    tokens = torch.randint(0, 50, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_model_sees_the_order_of_tokens():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocabulary=50, dim=16, layers=1, heads=2, max_length=4, tied=False)).double()
    last_hidden = [model(torch.tensor([tokens]))[0, -1] for tokens in ([1, 2, 3], [2, 1, 3])]
    assert not torch.allclose(*last_hidden)


def test_peak_memory_counts_what_is_alive_at_once():
    def allocate() -> None:
        for mib in (3, 8, 2):
            torch.empty(mib << 20, dtype=torch.uint8)

    assert peak_extra_bytes(allocate, torch.device("cpu")) == 8 << 20


def test_unfused_loss_costs_at_least_its_logits():
    rows, vocab = 64, 1000
    inputs = torch.randn(vocab, 8), torch.randn(rows, 8), torch.randint(0, vocab, (rows,))
    cost = measure({"unfused": unfused_loss}, *inputs, repeats=1)["unfused"]
    assert cost.milliseconds > 0
    # The logits' log-softmax is kept for backward, which turns it into the gradient.
    assert cost.peak_extra_bytes is not None
    assert 2 <= cost.peak_extra_bytes / (4 * rows * vocab) <= 4


def test_learning_rate_warms_up_and_decays():
    factors = [train_lm.learning_rate_factor(step, 100) for step in range(100)]
    warmup = train_lm.WARMUP_STEPS
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert max(factors) == 1
    assert factors[-1] == pytest.approx(0.1, abs=0.01)
    assert train_lm.learning_rate_factor(0, 1) == 1


def step_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step ")]


def table_value(output: str, label: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith(label)]
    return line.removeprefix(label).strip()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_run_prints_the_table_and_draws_the_curve(
    dtype: str, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "curve.png"
    arguments = ["--text", str(text_file), *SMALL_RUN, "--dtype", dtype, "--out", str(out)]
    assert train_lm.main(arguments) == 0
    output = capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")
    assert table_value(output, "backend") == "torch (named by --backend)"
    for label in ("labelled", "unigram entropy", "training loss", "held-out loss", "fused - unfused", "plan"):
        assert table_value(output, label)
    assert re.fullmatch(r"fused [\d,]+ ms, unfused [\d,]+ ms .*", table_value(output, "loss layer, time"))
    assert re.fullmatch(r"fused [\d.]+ MiB, unfused [\d.]+ MiB .*", table_value(output, "loss layer, memory"))

    steps = [re.findall(r"fused (\S+), unfused (\S+),", line) for line in step_lines(output)]
    assert len(steps) == 2
    # In half precision the unfused logits are rounded; a loss of 6 then moves by a few roundings of the logits.
    tolerance = 1e-5 if dtype in ("float32", "float64") else 1e-2
    for ((fused, unfused),) in steps:
        assert float(fused) == pytest.approx(float(unfused), abs=tolerance)


def test_run_is_repeatable_and_follows_the_seed(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    outputs = []
    for seed in ("0", "0", "1"):
        arguments = ["--text", str(text_file), *SMALL_RUN, "--tied", "--seed", seed, "--out", str(tmp_path / "x.png")]
        assert train_lm.main(arguments) == 0
        outputs.append(step_lines(capsys.readouterr().out))
    assert outputs[0] == outputs[1] != outputs[2]


def test_loss_falls_below_the_unigram_entropy(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    longer = [*SMALL_RUN, "--steps", "60", "--batch", "8", "--out", str(tmp_path / "x.png")]
    assert train_lm.main(["--text", str(text_file), *longer]) == 0
    output = capsys.readouterr().out
    entropy = float(table_value(output, "unigram entropy").split()[0])
    last = float(re.search(r"last ([\d.]+)", table_value(output, "held-out loss"))[1])
    assert last < entropy - 0.5


def bad_arguments(directory: Path) -> dict[str, tuple[list[str], str]]:
    """Command lines that cannot work, and what the error says."""
    (directory / "empty.txt").touch()
    (directory / "small.txt").write_text("a few words", encoding="utf-8")
    (directory / "binary.dat").write_bytes(bytes(range(256)))
    (directory / "nothing").mkdir()
    return {
        "missing path": (["--text", f"{directory}/none.txt"], "no such file or directory"),
        "empty file": (["--text", f"{directory}/empty.txt"], "empty.txt is empty"),
        "not text": (["--text", f"{directory}/binary.dat"], "binary.dat is not text"),
        "empty directory": (["--text", f"{directory}/nothing"], "holds no files"),
        "too little text": (["--text", f"{directory}/small.txt"], "too little text"),
        "impossible device": (["--device", "cuda:99"], "--device cuda:99 cannot be used"),
        "garbage device": (["--device", "toaster"], "--device toaster cannot be used"),
        "unknown backend": (["--backend", "nope"], "backend must be one of"),
        "unable backend": (["--backend", "triton"], "no backend can run the loss on cpu: triton: "),
        "bad dtype": (["--dtype", "int8"], "invalid choice: 'int8'"),
        "zero steps": (["--steps", "0"], "must be a whole number above 0"),
        "negative learning rate": (["--lr", "-1"], "must be a number above 0"),
        "bad seed": (["--seed", "x"], "must be a whole number from 0"),
        "tiny vocabulary": (["--vocab", "100"], "--vocab must be at least 257"),
        "odd heads": (["--dim", "30", "--heads", "4"], "--dim must be a multiple of 2 x --heads = 8"),
        "unwritable picture": (["--out", f"{directory}/none/x.png"], "cannot be written"),
        "unknown option": (["--foo"], "unrecognized arguments: --foo"),
    }


def test_mistakes_get_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("LIGER_BACKEND", raising=False)
    for name, (arguments, message) in bad_arguments(tmp_path).items():
        try:
            code: object = train_lm.main(arguments)
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        assert code == 2, name
        assert re.fullmatch(f"error: .*{re.escape(message)}.*\n", captured.err), name
        assert captured.out == "", name


def test_environment_backend_is_checked_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("LIGER_BACKEND", "nope")
    assert train_lm.main([]) == 2
    assert re.fullmatch(r"error: \$LIGER_BACKEND must be one of .*\n", capsys.readouterr().err)


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(SCRIPT.parents[1]), "TRITON_INTERPRET": "0", "LIGER_BACKEND": ""}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | own)


def test_script_runs_from_the_command_line(text_file: Path, tmp_path: Path):
    finished = run_script("--text", str(text_file), *SMALL_RUN, "--out", str(tmp_path / "curve.png"))
    assert finished.returncode == 0, finished.stderr
    assert table_value(finished.stdout, "loss curve") == str(tmp_path / "curve.png")
    assert "tokens/s" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_script_reports_a_mistake_in_one_line():
    finished = run_script("--text", "/no/such/path")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr == "error: no such file or directory: /no/such/path\n"


def test_module_docstring_is_the_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        train_lm.main(["--help"])
    assert stop.value.code == 0
    assert textwrap.dedent(train_lm.__doc__ or "").splitlines()[0] in capsys.readouterr().out


def test_a_split_head_trains_like_a_whole_one(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The same losses at every step, of the batch and of the held-out text, in six decimals; in float64."""
    script, curve = SCRIPT.with_name("train_tp.py"), tmp_path / "curve.png"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    settings = [*SMALL_RUN, "--check-every", "1", "--dtype", "float64"]
    arguments = ["--text", str(text_file), *settings, "--out", str(curve)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run([*launcher, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "head of 400 rows over 2 processes: [(0, 200), (200, 400)]" in finished.stdout
    assert finished.stdout.count("training loss") == 1
    assert curve.read_bytes().startswith(b"\x89PNG")
    assert train_lm.main(arguments) == 0
    without_rounding = [re.sub(r"difference \S+;", "", line) for line in step_lines(capsys.readouterr().out)]
    assert [re.sub(r"difference \S+;", "", line) for line in step_lines(finished.stdout)] == without_rounding
    assert len(without_rounding) == 6


def test_the_help_of_a_split_head_is_its_own(capsys: pytest.CaptureFixture[str]):
    import train_tp

    with pytest.raises(SystemExit) as stop:
        train_tp.main(["--help"])
    assert stop.value.code == 0
    told = capsys.readouterr().out
    assert (train_tp.__doc__ or "").splitlines()[0] in told
    assert "torchrun --nproc-per-node 2 examples/train_tp.py" in told


@pytest.mark.parametrize("flags", [["--tied"], ["--dtype", "float16"]])
def test_what_a_split_head_cannot_do_is_said(flags: list[str], capsys: pytest.CaptureFixture[str]):
    import train_tp

    assert train_tp.main(flags) == 2
    assert capsys.readouterr().err.startswith(f"error: {' '.join(flags)} is not possible")
