"""Texts as numbers: characters, bytes or hashed words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...arguments import need_memory, require_integer
from ..dataset import Rows

OTHER = "\N{REPLACEMENT CHARACTER}"  # token 0: any character outside the vocabulary
BYTES = 257  # tokens: 0 is padding, b + 1 is the byte b


def find_vocabulary(texts: Iterable[str], most: int) -> tuple[str, ...]:
    """Returns the tokens: OTHER, and the most frequent characters in the order of Unicode.

    Args:
        texts: of training; those of tests must not decide what a model can write.
        most: number of tokens at most.

    >>> find_vocabulary(["banana", "bad"], 3)
    ('\N{REPLACEMENT CHARACTER}', 'a', 'b')
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    del counts[OTHER]
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    return (OTHER, *sorted(ranked[: most - 1]))


def encode_characters(text: str, vocabulary: Sequence[str]) -> Rows:
    """Returns the number of each character in the vocabulary, [length]; 0 for others.

    >>> encode_characters("abba!", ["?", "a", "b"]).tolist()
    [1, 2, 2, 1, 0]
    """
    codes = np.frombuffer(text.encode("utf-32-le", errors="replace"), "<u4").astype(np.int64)
    if not len(codes):
        return codes
    number_of = np.zeros(max(int(codes.max()), *map(ord, vocabulary)) + 1, np.int64)
    for number, character in enumerate(vocabulary[1:], start=1):
        number_of[ord(character)] = number
    numbers: Rows = number_of[codes]
    return numbers


def encode_bytes(texts: Sequence[str], length: int) -> Rows:
    """Returns the first bytes of each text in UTF-8, plus 1, padded with 0, [n, length].

    >>> encode_bytes(["ab", ""], 3).tolist()
    [[98, 99, 0], [0, 0, 0]]
    """
    need_memory("texts", 8 * len(texts) * length, f"{len(texts)} texts of {length} bytes")
    tokens = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        start = text.encode(errors="replace")[:length]
        tokens[row, : len(start)] = np.frombuffer(start, np.uint8).astype(np.int64) + 1
    return tokens


def hash_words(texts: Sequence[str], features: int = 1024) -> NDArray[np.float32]:
    """Returns the words of each text as one vector, [n, features].

    Each word adds to the column that is the hash of its lower-case form, so that clients need no
    common list of words, and texts that come later can have new ones. It is scikit-learn's
    `HashingVectorizer(n_features=features, alternate_sign=False)` times the square root of
    `features`: entries then are of the size of standardised columns.

    Args:
        texts: documents.
        features: number of columns.

    >>> hash_words(["good", "Good!", "bad"], 8).argmax(1).tolist()
    [1, 1, 3]
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    require_integer("hash_words", "features", features, minimum=1)
    need_memory("texts", 8 * len(texts) * features, f"{len(texts)} texts and features={features}")
    counted = HashingVectorizer(n_features=features, alternate_sign=False).transform(texts)
    dense: NDArray[np.float32] = counted.astype(np.float32).toarray()
    return dense * np.float32(features**0.5)
