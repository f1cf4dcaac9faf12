"""A fake executor that keeps tokens in a paged cache, scripts for what it says, and small tokenizers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray

from llmc.runtime.batch import Batch
from llmc.runtime.kv_cache import KvCache
from llmc.runtime.llm import LLM
from llmc.runtime.scheduler import SchedulerConfig
from llmc.runtime.speculative.rules import Rule
from llmc.runtime.speculative.speculator import Speculator
from llmc.runtime.tokenizer import Tokenizer
from llmc.runtime.vocabulary import BYTE_OF

VOCAB = 384
Logits = NDArray[np.float32]
Model = Callable[[tuple[int, ...]], Logits]


class PagedExecutor:
    """Logits are a function of the tokens that the block tables lead to, so that any mistake in paging shows."""

    def __init__(self, model: Model, config: SchedulerConfig) -> None:
        self.model, self.config = model, config
        self.kv = np.full((config.num_blocks, config.block_size), -1, np.int64)
        self.batches: list[Batch] = []
        self.fail_at: int | None = None
        self.moved = 0
        self.failure: Exception = RuntimeError("launch failed")

    def step(self, batch: Batch) -> Logits:
        self.batches.append(batch)
        if self.fail_at == len(self.batches):
            raise self.failure
        assert 0 < len(batch.input_ids) <= self.config.max_batch_tokens
        assert len(batch.logit_rows) <= self.config.max_logit_rows
        assert len(batch.num_computed) <= self.config.max_sequences
        wanted = set(batch.logit_rows.tolist())
        rows = {}
        for s, computed in enumerate(batch.num_computed.tolist()):
            begin, end = batch.cu_seqlens[s : s + 2].tolist()
            slots = self._slots(batch.block_tables[s], computed + end - begin)
            seen = np.tri(end - begin, dtype=bool)
            if batch.tree_mask is not None:
                bits = np.unpackbits(batch.tree_mask[begin:end].view(np.uint8), axis=1, bitorder="little")
                seen = bits[:, : end - begin].astype(bool)
            assert (batch.position_ids[begin:end] == computed + seen.sum(1) - 1).all()
            self.kv[slots[0][computed:], slots[1][computed:]] = batch.input_ids[begin:end]
            history = self.kv[slots]
            for row in range(begin, end):
                if row in wanted:
                    past = [*history[:computed].tolist(), *history[computed:][seen[row - begin]].tolist()]
                    rows[row] = self.model(tuple(past))
        return np.array([rows[row] for row in batch.logit_rows.tolist()], np.float32).reshape(len(rows), VOCAB)

    def embed(self, batch: Batch, *, logits: bool) -> tuple[Logits, Logits | None]:
        rows = self.step(batch)
        return rows.copy(), rows if logits else None

    def move_positions(self, blocks: Any, sources: Any, targets: Any) -> None:
        size = self.config.block_size
        for source, target in zip(sources, targets, strict=True):
            self.moved += 1
            self.kv[blocks[target // size], target % size] = self.kv[blocks[source // size], source % size]

    def poisons(self, cache: KvCache) -> None:
        """What the cache gives up is overwritten."""

        def poison(blocks: list[int]) -> None:
            self.kv[blocks] = -7

        cache.on_free = poison

    def _slots(self, table: NDArray[np.int32], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(length)
        return table[positions // self.config.block_size].astype(np.int64), positions % self.config.block_size


def hashed(history: tuple[int, ...]) -> Logits:
    """Pseudo-random logits that depend on every token."""
    return np.random.default_rng(zlib.crc32(np.array(history).tobytes())).normal(size=VOCAB).astype(np.float32) * 3


def one_hot(token: int, strength: float = 10.0) -> Logits:
    logits = np.zeros(VOCAB, np.float32)
    logits[token] = strength
    return logits


def scripted(scripts: Mapping[tuple[int, ...], Sequence[int]]) -> Model:
    """The script model: after prompt p (a key) its i-th token is scripts[p][i], then id 3 for ever."""

    def model(history: tuple[int, ...]) -> Logits:
        for prompt, script in scripts.items():
            if history[: len(prompt)] == prompt:
                i = len(history) - len(prompt)
                return one_hot(script[i] if i < len(script) else 3)
        return one_hot(3)

    return model


def config(**values: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {
        "max_seq_len": 512,
        "max_batch_tokens": 64,
        "max_sequences": 16,
        "max_logit_rows": 16,
        "num_blocks": 256,
        "block_size": 16,
        "check": True,
    }
    return SchedulerConfig(**(defaults | values))


def byte_level_spec(added: Sequence[str] = ()) -> dict[str, Any]:
    """The tokenizer of T0: <pad>, <s>, </s>, 256 bytes (ids 3 to 258), then some merges and added special tokens."""
    characters = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(characters)}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("l", "l"), ("e", "ll"), ("ell", "o"), ("f", "o"), ("fo", "o")]
    merges += [("b", "a"), ("ba", "r"), ("Ġ", "bar"), ("d", "."), ("d.", "Ċ"), ("a", "b"), ("X", "Y"), ("XY", "Z")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    special = ["<pad>", "<s>", "</s>", *added]
    for token in added:
        vocab[token] = len(vocab)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[t], "content": t, **flags} for t in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(m) for m in merges],
        },
    }


def sentencepiece_spec() -> dict[str, Any]:
    """A Llama-like tokenizer: pieces with ▁, bytes as <0x..>, one space dropped at the start of a text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": b + 3 for b in range(256)}
    for piece in ["▁", "a", "b", "c", "h", "i", "e", "l", "o", ".", "▁a", "▁h", "▁hi", "▁the"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "h"), ("▁h", "i")]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        **byte_level_spec(),
        "added_tokens": [{"id": i, "content": t, **flags} for i, t in enumerate(["<unk>", "<s>", "</s>"])],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            **byte_level_spec()["model"],
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [list(m) for m in merges],
        },
    }


class Kit:
    """What tests of the runtime share; the fixture `kit`."""

    VOCAB = VOCAB
    PagedExecutor = PagedExecutor
    hashed = staticmethod(hashed)
    one_hot = staticmethod(one_hot)
    scripted = staticmethod(scripted)
    config = staticmethod(config)
    byte_level_spec = staticmethod(byte_level_spec)
    sentencepiece_spec = staticmethod(sentencepiece_spec)

    @staticmethod
    def tokenizer(spec: dict[str, Any] | None = None, **options: Any) -> Tokenizer:
        return Tokenizer(json.dumps(spec or byte_level_spec()), **options)

    @staticmethod
    def library(spec: dict[str, Any]) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))

    @classmethod
    def llm(
        cls, model: Model = hashed, *, spec: dict[str, Any] | None = None, eos: Sequence[int] = (2,), **values: Any
    ):
        """An LLM around the fake executor; ``values`` go to the scheduler, but for those that are from_parts' own."""
        tokenizer = values.pop("tokenizer", None) or cls.tokenizer(spec)
        default, proposer = values.pop("default_max_tokens", None), values.pop("proposer", None)
        rule = values.pop("rule", Rule.EXACT)
        sizes = config(**values)
        executor = PagedExecutor(model, sizes)
        return LLM.from_parts(
            executor,
            sizes,
            vocab_size=VOCAB,
            tokenizer=tokenizer,
            eos_token_ids=eos,
            default_max_tokens=default,
            speculator=None
            if proposer is None
            else Speculator(proposer, executor, vocab_size=VOCAB, nodes=6, rule=rule),
        )

    @classmethod
    def script(cls, scripts: Mapping[str, Sequence[int]], **options: Any) -> LLM:
        """An LLM that answers each prompt with its script."""
        tokenizer = options.setdefault("tokenizer", cls.tokenizer(options.pop("spec", None)))
        return cls.llm(scripted({tuple(tokenizer.encode(p)): list(s) for p, s in scripts.items()}), **options)

    @staticmethod
    def ids(text: str | bytes) -> list[int]:
        """The single-byte tokens of a text."""
        return [b + 3 for b in (text.encode() if isinstance(text, str) else text)]


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit
