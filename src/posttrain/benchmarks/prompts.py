"""Prompts of a known number of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from posttrain.errors import ConfigError
from posttrain.randomness import stream
from posttrain.types import Int32

FIRST_PLAIN_ID = 20
"""Special tokens of the models used here lie below; prompts are ordinary tokens."""

MAX_TRIES = 1000

MIN_WORDS = 50


def random_prompts(count: int, mean_tokens: int, vocab_size: int) -> list[Int32]:
    """Prompts [P] of ordinary ids, lengths within a quarter of the mean so that padding is real."""
    rng = stream(0, "bench prompts")
    lengths = rng.integers(max(1, mean_tokens * 3 // 4), mean_tokens * 5 // 4 + 1, count)
    return [rng.integers(FIRST_PLAIN_ID, vocab_size, n).astype(np.int32) for n in lengths]


def exact_ids(count: int, tokens: int, vocab_size: int, *keys: int) -> list[Int32]:
    """`count` sequences of `tokens` ordinary ids each, all different."""
    rng = stream(0, "bench ids", *keys)
    return [rng.integers(FIRST_PLAIN_ID, vocab_size, tokens).astype(np.int32) for _ in range(count)]


def exact_texts(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """`count` different texts of `tokens` tokens each: words in random order.

    Raises ConfigError when too few texts come out right with this tokenizer.
    """
    pieces = _word_tokens(tokenizer)
    rng = stream(0, "bench texts", tokens)
    texts: list[str] = []
    for _ in range(MAX_TRIES + count):
        text = "".join(pieces[i] for i in rng.integers(0, len(pieces), tokens))
        if len(tokenizer.encode(text, add_special_tokens=False)) == tokens:
            texts.append(text)
        if len(texts) == count:
            return texts
    raise ConfigError(
        f"{len(texts)} texts of exactly {tokens} tokens were found in {MAX_TRIES} tries with this "
        f"tokenizer, {count} are needed; try another --prompt-tokens"
    )


def _word_tokens(tokenizer: Any) -> list[str]:
    """Texts of single tokens that are words, with the space before them where there are such."""
    texts = [tokenizer.decode([i]) for i in range(FIRST_PLAIN_ID, len(tokenizer))]
    words = [t for t in texts if t.isascii() and t.strip().isalpha()]
    spaced = [w for w in words if w.startswith(" ")]
    return spaced if len(spaced) >= MIN_WORDS else words
