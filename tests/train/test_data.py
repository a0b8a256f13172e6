"""Samples by index: mock data, text files, token files, order and hold-out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from shardwise.errors import InputError
from shardwise.train.config import RunConfig
from shardwise.train.data import Dataset, MockTokens, StoredTokens, open_dataset
from shardwise.train.overrides import apply

CPU = torch.device("cpu")
BYTES = ["tokenizer.tokenizer_type=ByteTokenizer", "model.seq_length=8", "dataset.eval_fraction=0.1"]


def test_mock_documents_count_up_and_end():
    stream = MockTokens(50, 20)
    tokens = stream.read(0, stream.size)
    ends = np.flatnonzero(tokens == stream.end)
    lengths = np.random.default_rng(0).integers(1, 4096, size=20)
    first = tokens[: lengths[0]]
    assert first[0] == 1 and all(first == (np.arange(lengths[0]) + 1) % 49)
    assert tokens[lengths[0]] == stream.end and lengths[0] in ends
    assert np.array_equal(stream.read(100, 900), tokens[100:900])


def dataset(**changes) -> Dataset:
    return Dataset(StoredTokens(np.arange(1, 402), 500, 499), 10, **{"seed": 1, "eval_fraction": 0.1, "inside_documents": False, **changes})


def test_an_epoch_holds_every_sample_once_and_the_next_is_shuffled_anew():
    data = dataset()
    first, second = (data.train(epoch * data.count, data.count, CPU).tokens[:, 0].tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == sorted(set(first)) and first != second
    held_out = data.evaluation(0, data.held_out, CPU).tokens[:, 0].tolist()
    assert data.count + data.held_out == 40 and not set(held_out) & set(first)


def test_samples_depend_on_the_index_alone():
    whole = dataset().train(0, 6, CPU).tokens
    assert torch.equal(torch.cat([dataset().train(index, 2, CPU).tokens for index in (0, 2, 4)]), whole)


def test_labels_are_the_next_tokens():
    samples = dataset().train(0, 3, CPU)
    assert torch.equal(samples.labels, samples.tokens + 1) and samples.positions[0].tolist() == list(range(10))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "bin"])
def test_files_hold_the_same_tokens(kind, tmp_path):
    documents = ["one two three four", "five six seven eight", "nine ten eleven twelve"]
    path = tmp_path / f"data.{kind}"
    tokens = [token for text in documents for token in [*text.encode(), 256]]
    if kind == "txt":
        path.write_text("".join(documents))
        tokens = [*"".join(documents).encode(), 256]
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    elif kind == "parquet":
        pa = pytest.importorskip("pyarrow", reason="Parquet files need the data extra")
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": documents}), path)
    else:
        np.array(tokens, dtype=np.uint16).tofile(path)
    config = apply(RunConfig(), [*BYTES, f"dataset.data_path={path}"])
    data = open_dataset(config, 257)
    assert data.tokens.size == len(tokens) and data.tokens.read(0, len(tokens)).tolist() == tokens


@pytest.mark.parametrize(
    ("name", "content", "words", "said"),
    [
        ("missing.txt", None, BYTES, "no such file"),
        ("data.csv", "x", BYTES, "are not read"),
        ("data.txt", "some text of some length", [], "needs a tokenizer"),
        ("data.jsonl", '{"body": "x"}\n', BYTES, "line 1"),
        ("data.txt", "short", BYTES, "one sample needs 9"),
    ],
)
def test_wrong_files_are_named(name, content, words, said, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=said):
        open_dataset(apply(RunConfig(), [*words, f"dataset.data_path={path}"]), 257)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("zzzzzzzzzzzzzzzzzzzz")
    with pytest.raises(InputError, match=r"model\.vocab_size=257"):
        open_dataset(apply(RunConfig(), [*BYTES, f"dataset.data_path={path}"]), 100)
