"""
Byte-level byte-pair encoding (BPE): text -> UTF-8 bytes -> merged into ever longer tokens.

    "low lower"  ->  "low", " lower"      split by PATTERN: no token crosses a word
    l o w        ->  lo w  ->  low        the most frequent neighbours merge first

Two tokenizers: "bpe", trained here on the corpus itself, and "gpt2-49152", the first 49,151 tokens of
GPT-2's plus <|endoftext|>, so that the vocabulary is exactly 49,152.
A prefix of a merge list is itself a valid BPE. Either is kept beside the tokens as tiktoken.json, the
arguments of a tiktoken.Encoding, so that reading a dataset needs nothing else.
"""

import base64
import hashlib
import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from config import try_json

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tiktoken.json"

# GPT-2's splitting rule with explicit character classes, on which Python's re and tiktoken's engine
# agree: contractions, words (any non-ASCII character counts as a letter), up to three digits,
# other signs, white space. A space sticks to what follows it.
_LETTER = r"A-Za-z\u0080-\U0010ffff"
_SPACE = r" \t\n\r\f\v"
PATTERN = (
    rf"'(?:[sdmt]|ll|ve|re)| ?[{_LETTER}]+| ?[0-9]{{1,3}}| ?[^{_SPACE}0-9{_LETTER}]+"
    rf"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)

# -------------------------------------------------------------------------------
# training


def count_words(texts: Iterable[str]) -> Counter:
    """How often each word of PATTERN occurs, as bytes."""
    words = Counter()
    for text in texts:
        words.update(re.findall(PATTERN, text))
    return Counter({word.encode(): n for word, n in words.items()})


def train_bpe(words: Counter, n_tokens: int) -> list[bytes]:
    """
    The n_tokens byte strings of a BPE: the 256 bytes, then one merge after the other, each of the most
    frequent pair of neighbours (of equal ones the pair of the smallest ids). Fewer when every word is
    one token. Raises ValueError below 256.

    Counting anew after each merge costs (merges x corpus). Instead, the counts are kept, and a merge
    visits only the words that have the pair (arXiv:1508.07909 trains the same merges).
    """
    if n_tokens < 256:
        raise ValueError(f"a byte-level BPE has at least 256 tokens, got {n_tokens}")
    tokens = [bytes([i]) for i in range(256)]
    id_of = {token: i for i, token in enumerate(tokens)}
    spelled = [(list(word), n) for word, n in sorted(words.items())]  # each word as token ids
    counts, where = Counter(), defaultdict(set)                       # pair -> count, words with it
    for i, (ids, n) in enumerate(spelled):
        for pair in zip(ids, ids[1:]):
            counts[pair] += n
            where[pair].add(i)
    # A heap of (-count, pair). An entry whose count has changed is stale: it goes back corrected.
    heap = [(-n, pair) for pair, n in counts.items()]
    heapq.heapify(heap)
    while len(tokens) < n_tokens and heap:
        negative, pair = heapq.heappop(heap)
        if -negative != counts[pair]:
            if counts[pair] > 0:
                heapq.heappush(heap, (-counts[pair], pair))
            continue
        # Two pairs may spell the same token, aa + a and a + aa: one token, as tiktoken sees it.
        token = tokens[pair[0]] + tokens[pair[1]]
        new_id = id_of.setdefault(token, len(tokens))
        if new_id == len(tokens):
            tokens.append(token)
        changed = set()
        for i in where.pop(pair):
            ids, n = spelled[i]
            merged = merge(ids, pair, new_id)
            for old in zip(ids, ids[1:]):
                counts[old] -= n
            for new in zip(merged, merged[1:]):
                counts[new] += n
                where[new].add(i)
                changed.add(new)
            spelled[i] = (merged, n)
        counts.pop(pair, None)
        for new in changed - {pair}:
            heapq.heappush(heap, (-counts[new], new))
    return tokens


def merge(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """Replace each occurrence of pair by new, left to right. [1, 1, 1], (1, 1), 9 -> [9, 1]"""
    out, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


# -------------------------------------------------------------------------------
# tiktoken encodings


def bpe_spec(words: Counter, vocab_size: int) -> dict:
    """A trained tokenizer with exactly vocab_size ids, end-of-text last. Raises if words are too few."""
    tokens = train_bpe(words, vocab_size - 1)
    if len(tokens) < vocab_size - 1:
        raise ValueError(
            f"this text has only enough words for vocab_size={len(tokens) + 1}, got {vocab_size}: lower "
            "vocab_size, or use more text"
        )
    return make_spec(f"bpe-{vocab_size}", PATTERN, tokens)


def gpt2_spec() -> dict:
    """GPT-2's BPE kept to 49,152 ids. tiktoken fetches its files once, or reads TIKTOKEN_CACHE_DIR."""
    import tiktoken

    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the network raises
        raise ValueError(
            f"cannot fetch GPT-2's vocabulary ({type(error).__name__}): connect to the network once, "
            "or set TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's files"
        ) from error
    by_rank = sorted(gpt2._mergeable_ranks.items(), key=lambda item: item[1])
    return make_spec("gpt2-49152", gpt2._pat_str, [token for token, _ in by_rank[:49151]])


def make_spec(name: str, pattern: str, tokens: list[bytes]) -> dict:
    return {
        "name": name,
        "pat_str": pattern,
        "special_tokens": {END_OF_TEXT: len(tokens)},
        "mergeable_ranks": [base64.b64encode(token).decode() for token in tokens],
    }


def spec_bytes(spec: dict) -> bytes:
    """The content of tiktoken.json."""
    return json.dumps(spec, indent=0).encode()


def digest(spec: dict) -> str:
    """SHA-256 of tiktoken.json, by which a dataset and a checkpoint know their tokenizer."""
    return hashlib.sha256(spec_bytes(spec)).hexdigest()


def read_spec(folder: str | Path) -> dict:
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise ValueError(f"{path} is missing: copy it from the dataset, or prepare the dataset again")
    spec = try_json(path.read_text(encoding="utf-8"))
    keys = {"name", "pat_str", "special_tokens", "mergeable_ranks"}
    if not isinstance(spec, dict) or keys - set(spec):
        raise ValueError(f"{path} is damaged: copy it from the dataset, or prepare the dataset again")
    return spec


def load_encoding(spec: dict):
    """The tiktoken.Encoding of a spec."""
    import tiktoken

    ranks = {base64.b64decode(token): i for i, token in enumerate(spec["mergeable_ranks"])}
    return tiktoken.Encoding(
        spec["name"],
        pat_str=spec["pat_str"],
        mergeable_ranks=ranks,
        special_tokens=spec["special_tokens"],
    )


def token_lengths(spec: dict) -> np.ndarray:
    """Bytes of text that each id stands for, (V,) int64; end-of-text stands for none."""
    lengths = [len(base64.b64decode(token)) for token in spec["mergeable_ranks"]]
    return np.array(lengths + [0] * len(spec["special_tokens"]), dtype=np.int64)
