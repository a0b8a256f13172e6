"""Samples by index: the same index gives the same tokens on every rank, in every layout, and after a resume.

Mock data are those of Megatron Bridge's mock dataset in kind: documents of a length uniform in [1, 4096) that count 1, 2, 3, ... modulo
the vocabulary and end with the end-of-document token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.train.batches import Samples, packed_samples, simple_samples
from shardwise.train.config import RunConfig


class Tokens(Protocol):
    """A stream of tokens: its length, and any run of it as int64."""

    size: int
    vocab: int
    end: int

    def read(self, start: int, stop: int) -> np.ndarray: ...


class MockTokens:
    """The mock stream, computed where it is read."""

    def __init__(self, vocab: int, documents: int) -> None:
        self.vocab, self.end = vocab, vocab - 1
        lengths = np.random.default_rng(0).integers(1, 4096, size=documents)
        self._stops = np.cumsum(lengths + 1)
        self.size = int(self._stops[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        at = np.arange(start, stop, dtype=np.int64)
        document = np.searchsorted(self._stops, at, side="right")
        begins = np.where(document > 0, self._stops[np.maximum(document - 1, 0)], 0)
        tokens = (at - begins + 1) % max(1, self.vocab - 1)
        return np.where(at == self._stops[document] - 1, self.end, tokens)


class StoredTokens:
    """Tokens in memory, or in a memory-mapped file of uint16 or uint32."""

    def __init__(self, values: np.ndarray, vocab: int, end: int) -> None:
        self._values, self.vocab, self.end = values, vocab, end
        self.size = len(values)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.asarray(self._values[start:stop], dtype=np.int64)


class ByteTokenizer:
    """Bytes as tokens 0 to 255; 256 ends a document."""

    vocab, end = 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))


class FileTokenizer:
    """A `tokenizer.json` of the tokenizers package. The end of a document is its `</s>`, `<|endoftext|>` or `<eos>`, else a new token."""

    def __init__(self, path: str) -> None:
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise InputError(
                given=f"tokenizer.tokenizer_model={path}", why="there is no tokenizer.json", try_="the path of a tokenizer.json"
            )
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))
        size = self._tokenizer.get_vocab_size()
        ends = (self._tokenizer.token_to_id(word) for word in ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>"))
        end = next((found for found in ends if found is not None), None)
        self.vocab, self.end = (size, end) if end is not None else (size + 1, size)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def tokenizer_of(config: RunConfig) -> ByteTokenizer | FileTokenizer | None:
    """The tokenizer of a configuration; None for token numbers."""
    t = config.tokenizer
    if t.tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if t.tokenizer_type == "HuggingFaceTokenizer":
        if t.tokenizer_model is None:
            raise InputError(
                given="tokenizer_type=HuggingFaceTokenizer", why="no file is named", try_="tokenizer.tokenizer_model=tokenizer.json"
            )
        return FileTokenizer(t.tokenizer_model)
    return None


def open_tokens(config: RunConfig, vocab: int) -> Tokens:
    """The token stream of a configuration. Raises `InputError` for files that cannot be read or hold tokens outside the vocabulary."""
    paths = config.dataset.data_path
    if paths is None:
        return MockTokens(vocab, config.dataset.mock_documents)
    tokenizer = tokenizer_of(config)
    streams = [_file_tokens(Path(path), tokenizer, config, vocab) for path in paths]
    end = tokenizer.end if tokenizer else vocab - 1
    stored = streams[0] if len(streams) == 1 else np.concatenate(streams)
    top = max((int(stream.max()) for stream in streams if len(stream)), default=0)
    if top >= vocab:
        raise InputError(
            given=f"token {top} in {', '.join(paths)}", why=f"the model knows {vocab} tokens", try_=f"model.vocab_size={top + 1}"
        )
    return StoredTokens(stored, vocab, end)


def _file_tokens(path: Path, tokenizer: ByteTokenizer | FileTokenizer | None, config: RunConfig, vocab: int) -> np.ndarray:
    given = f"dataset.data_path: {path}"
    if not path.is_file():
        raise InputError(given=given, why="there is no such file", try_="a .txt, .jsonl, .parquet or .bin file")
    if path.suffix == ".bin":
        return np.memmap(path, dtype=np.uint16 if vocab <= 1 << 16 else np.uint32, mode="r")
    if tokenizer is None:
        raise InputError(given=given, why="text needs a tokenizer, NullTokenizer has none", try_="tokenizer.tokenizer_type=ByteTokenizer")
    pieces: list[int] = []
    for text in _documents(path, config.dataset.text_key):
        pieces += [*tokenizer.encode(text), tokenizer.end]
    return np.array(pieces, dtype=np.uint32)


def _documents(path: Path, key: str) -> Iterator[str]:
    given = f"dataset.data_path: {path}"
    if path.suffix == ".txt":
        yield path.read_text(encoding="utf-8")
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield str(json.loads(line)[key])
                except (ValueError, KeyError, TypeError):
                    why = f"line {number} is not an object with {key!r}"
                    raise InputError(given=given, why=why, try_="dataset.text_key=NAME of the text") from None
    elif path.suffix == ".parquet":
        from pyarrow import parquet

        table = parquet.ParquetFile(path)
        if key not in table.schema_arrow.names:
            raise InputError(given=given, why=f"it has no column {key!r}", try_=f"dataset.text_key={table.schema_arrow.names[0]}")
        for batch in table.iter_batches(columns=[key]):
            yield from (str(value) for value in batch.column(0).to_pylist() if value is not None)
    else:
        raise InputError(given=given, why=f"files ending in {path.suffix or 'nothing'} are not read", try_=".txt, .jsonl, .parquet or .bin")


class Dataset:
    """Samples of `length` tokens from a stream, in an order shuffled anew every epoch; the last ones are kept for evaluation."""

    def __init__(self, tokens: Tokens, length: int, *, seed: int, eval_fraction: float, inside_documents: bool) -> None:
        self.tokens, self.length, self.seed, self.inside = tokens, length, seed, inside_documents
        total = (tokens.size - 1) // length
        if total < 1:
            raise InputError(
                given=f"{tokens.size} tokens of data",
                why=f"one sample needs {length + 1}",
                try_=f"model.seq_length of at most {tokens.size - 1}",
            )
        self.held_out = min(max(1, round(total * eval_fraction)), total - 1) if total > 1 else 0
        self.count = total - self.held_out
        self._orders: dict[int, np.ndarray] = {}

    def _place(self, index: int) -> int:
        epoch, within = divmod(index, self.count)
        if epoch not in self._orders:
            self._orders = {epoch: np.random.default_rng((self.seed, epoch)).permutation(self.count)}
        return int(self._orders[epoch][within])

    def _read(self, places: list[int], device: torch.device) -> Samples:
        rows = [self.tokens.read(place * self.length, (place + 1) * self.length + 1) for place in places]
        tokens: Tensor = torch.from_numpy(np.stack(rows)).to(device)
        return packed_samples(tokens, self.tokens.end) if self.inside else simple_samples(tokens)

    def train(self, first: int, count: int, device: torch.device) -> Samples:
        """Samples `first`, `first + 1`, ... of the run."""
        return self._read([self._place(index) for index in range(first, first + count)], device)

    def evaluation(self, first: int, count: int, device: torch.device) -> Samples:
        """Held-out samples, repeated when there are too few; those of training when none is held out."""
        start, size = (self.count, self.held_out) if self.held_out else (0, self.count)
        return self._read([start + index % size for index in range(first, first + count)], device)


def open_dataset(config: RunConfig, vocab: int) -> Dataset:
    data = config.dataset
    return Dataset(
        open_tokens(config, vocab),
        config.model.seq_length,
        seed=data.random_seed,
        eval_fraction=data.eval_fraction,
        inside_documents=data.reset_attention_mask,
    )
