"""A BPE tokenizer of the corpus, and its token ids in files that are mapped into memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nsa_backend.benchmarks.trained import corpus

BOS, EOS = 0, 1
SPECIAL = ["<|begin|>", "<|end|>"]
WORDS = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n+[ \t]*|\s+"
"""Words with their leading space, runs of up to three digits, runs of punctuation, line ends with indentation."""
SAMPLE_CHARACTERS = 60_000_000
"""What the tokenizer is trained on; more costs time and changes few merges."""


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE; raises ValueError where the texts do not give `vocab` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {vocab}: take more text")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(ids uint16 [tokens], ends int64 [documents]): documents one after the other, each followed by EOS."""
    parts, ends, total = [], [], 0
    for start in range(0, len(texts), 2000):
        for encoded in tokenizer.encode_batch_fast(texts[start : start + 2000], add_special_tokens=False):
            ids = encoded.ids
            parts.append(np.array([*ids, EOS], dtype=np.uint16))
            total += len(parts[-1])
            ends.append(total)
    return np.concatenate(parts), np.array(ends, dtype=np.int64)


@dataclass(frozen=True)
class Prepared:
    """The folder with tokenizer.json, train.npy, held_out.npy, held_out_ends.npy and packages.json."""

    folder: Path

    @property
    def done(self) -> bool:
        return (self.folder / "packages.json").exists()

    def load(self, name: str) -> np.ndarray:
        """`train`, `held_out` or `held_out_ends`, mapped and not read."""
        return np.load(self.folder / f"{name}.npy", mmap_mode="r")

    @property
    def packages(self) -> dict:
        return json.loads((self.folder / "packages.json").read_text())


def prepare(
    folder: Path, vocab: int, seed: int, say: Callable[[str], None], *, most_bytes: int, held_share: float = 0.05,
    found: list[corpus.Document] | None = None,
) -> Prepared:  # fmt: skip
    """Walk, split, tokenize and pack, unless `folder` has it all already."""
    prepared = Prepared(folder)
    if prepared.done:
        return prepared
    folder.mkdir(parents=True, exist_ok=True)
    if found is None:
        files = [one for root, prefix in corpus.roots().items() for one in corpus.paths(root, prefix)]
        say(f"reading at most {len(files)} files")
        found = corpus.documents(corpus.in_packages(files, seed), most_bytes)
    training, held = corpus.split(found, held_share, seed, most_bytes)
    texts = [d.text for d in training]
    size = sum(map(len, texts)) / 1e6
    say(f"{len(training)} files of {size:.0f} MB to train on, {len(held)} held out; training the tokenizer")
    tokenizer = train_tokenizer(_sample(texts), vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    say("tokenizing")
    ids, _ = encode(tokenizer, texts)
    held_ids, held_ends = encode(tokenizer, [d.text for d in held])
    for name, values in (("train", ids), ("held_out", held_ids), ("held_out_ends", held_ends)):
        np.save(folder / f"{name}.npy", values)
    counts = {"training_tokens": len(ids), "held_out_tokens": len(held_ids)}
    packages = {"training": corpus.summary(training), "held_out": corpus.summary(held)}
    (folder / "packages.json").write_text(json.dumps(counts | packages))
    say(f"{len(ids) / 1e6:.1f}M tokens to train on, {len(held_ids) / 1e6:.1f}M held out")
    return prepared


def _sample(texts: list[str]) -> list[str]:
    total, count = 0, 0
    for text in texts:
        total += len(text)
        count += 1
        if total > SAMPLE_CHARACTERS:
            break
    return texts[:count]


class Blocks:
    """Blocks of consecutive tokens in a shuffled order that depends on the seed alone, epoch after epoch."""

    def __init__(self, ids: np.ndarray, length: int, seed: int, more: int = 2):
        """Block i is ids[i * length : (i + 1) * length + more]: these are what the last position's heads predict."""
        self._ids, self.length, self._seed, self._more = ids, length, seed, more
        self.count = (len(ids) - more) // length
        if self.count < 1:
            raise ValueError(f"{len(ids)} tokens hold no block of {length} + {more}: take more text or a shorter context")
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, first: int, size: int) -> torch.Tensor:
        """int64 [size, length + more]: blocks number first, first + 1, ... of the endless order."""
        rows = [self._block(number) for number in range(first, first + size)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _block(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.count)
        if epoch not in self._orders:
            self._orders = {epoch: np.random.default_rng([self._seed, epoch]).permutation(self.count)}
        start = int(self._orders[epoch][place]) * self.length
        return self._ids[start : start + self.length + self._more]
