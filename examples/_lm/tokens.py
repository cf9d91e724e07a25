"""Segments to tokens: a byte-level BPE trained on the text itself, next-token targets without the prompt, batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from _lm.text import Corpus, InputError

IGNORE_INDEX = -100
END_OF_TEXT = "<|endoftext|>"
MIN_VOCABULARY = 256 + 1
"""Every byte and the end of a document."""


def train_tokenizer(corpus: Corpus, vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE on the segments; text with few distinct words gives fewer entries than asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    segments = (segment.text for document in corpus.documents for segment in document)
    tokenizer.train_from_iterator(segments, trainer)
    tokenizer.encode_special_tokens = True  # a document that spells out "<|endoftext|>" does not end there
    return tokenizer


@dataclass(frozen=True)
class TokenStream:
    """All documents in one row of tokens, each followed by the end-of-text token."""

    ids: Tensor
    """int64, (tokens,)"""
    is_answer: Tensor
    """bool, (tokens,): whether the loss may ask for this token."""


def encode(corpus: Corpus, tokenizer: Tokenizer) -> TokenStream:
    """Encode segment by segment, so that no token holds characters of both prompt and answer."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    if end_of_text is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT} token")
    segments = [segment for document in corpus.documents for segment in document]
    encodings = iter(zip(segments, tokenizer.encode_batch_fast([segment.text for segment in segments]), strict=True))
    ids: list[int] = []
    is_answer: list[bool] = []
    for document in corpus.documents:
        for segment, encoding in itertools.islice(encodings, len(document)):
            ids += encoding.ids
            is_answer += [segment.is_answer] * len(encoding.ids)
        ids.append(end_of_text)
        is_answer.append(True)
    return TokenStream(torch.tensor(ids), torch.tensor(is_answer))


@dataclass(frozen=True)
class Sequences:
    """Inputs and next-token targets of consecutive, disjoint windows of a token stream."""

    inputs: Tensor
    """int64, (sequences, length)"""
    targets: Tensor
    """int64, (sequences, length): the token after each input, IGNORE_INDEX where that one belongs to the prompt."""

    @property
    def labelled(self) -> Tensor:
        """The targets that count, (labelled,)."""
        return self.targets[self.targets != IGNORE_INDEX]

    @property
    def labelled_share(self) -> float:
        return self.labelled.numel() / self.targets.numel()


def make_sequences(stream: TokenStream, length: int) -> Sequences:
    """Cut a stream into windows; the tokens left over at the end (fewer than a window) are dropped."""
    count = max(0, (stream.ids.numel() - 1) // length)
    used = count * length
    targets = torch.where(stream.is_answer, stream.ids, IGNORE_INDEX)[1 : used + 1]
    return Sequences(stream.ids[:used].view(count, length), targets.view(count, length))


def split_held_out(sequences: Sequences, batch: int, max_held_out: int) -> tuple[Sequences, Sequences]:
    """Split into training and validation: of the last twentieth of the text, sequences spread evenly over it.

    The last twentieth is other files than the rest (bar the one it begins in). Raises InputError where less than one
    batch is left to train on, or a part has no labelled token.
    """
    count, length = sequences.inputs.shape
    tail = max(1, count // 20)
    if count - tail < batch:
        raise InputError(
            f"too little text: it makes {count} sequences of {length} tokens, and a batch of {batch} with one held out "
            f"needs {batch + 1}; give more text, or a smaller --batch or --seq"
        )
    spread = torch.linspace(count - tail, count - 1, min(tail, max_held_out)).long()
    training = Sequences(sequences.inputs[:-tail], sequences.targets[:-tail])
    held_out = Sequences(sequences.inputs[spread], sequences.targets[spread])
    for name, part in (("training", training), ("held-out", held_out)):
        if not part.labelled.numel():
            raise InputError(f"too little text: the {name} part is all prompt (comments, docstrings), nothing to learn")
    return training, held_out


def batches(sequences: Sequences, batch: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches (inputs, targets) forever, in a new random order in every epoch; those without a label are left out.

    A mean over no label is nothing to learn from, and nothing to compare: PyTorch's is NaN, this package's 0.
    """
    while True:
        order = torch.randperm(len(sequences.inputs), generator=generator)
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch]
            inputs, targets = sequences.inputs[chosen], sequences.targets[chosen]
            if (targets != IGNORE_INDEX).any():
                yield inputs, targets


def unigram_entropy(labels: Tensor) -> float:
    """Entropy of the labels' own frequencies, nats per token: the loss of the best guess that ignores the context."""
    counts = labels.bincount().double()
    shares = counts[counts > 0] / labels.numel()
    return float(-(shares * shares.log()).sum())
