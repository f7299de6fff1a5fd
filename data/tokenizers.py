"""
Byte-level byte-pair encoding (BPE): text -> UTF-8 bytes -> merged into ever longer tokens.

    "low lower"  ->  "low", " lower"      split by PATTERN: no token crosses a word
    l o w        ->  lo w  ->  low        the most frequent neighbours merge first

There are two tokenizers: "bpe", trained here on the corpus itself, and "gpt2-49152", the first
49,151 tokens of GPT-2's plus <|endoftext|>, so that the vocabulary is exactly 49,152. A prefix of a
merge list is itself a valid BPE. Either is kept beside the tokens as tiktoken.json, the arguments
of a tiktoken.Encoding, so that reading a dataset needs nothing else.
"""

import base64
import hashlib
import heapq
import json
import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken

from config import try_json

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tiktoken.json"

# GPT-2's splitting rule with explicit character classes, on which Python's re and tiktoken's engine
# agree: contractions, words (any non-ASCII character counts as a letter), up to three digits,
# other signs, white space. A space sticks to what follows it. A longer run is cut: scripts without
# spaces, base64 or a line of dashes would make words that are too long to count and to merge.
_LETTER = r"A-Za-z\u0080-\U0010ffff"
_SPACE = r" \t\n\r\f\v"
PATTERN = (
    rf"'(?:[sdmt]|ll|ve|re)| ?[{_LETTER}]{{1,32}}| ?[0-9]{{1,3}}"
    rf"| ?[^{_SPACE}0-9{_LETTER}]{{1,32}}|[{_SPACE}]{{1,32}}(?![^{_SPACE}])|[{_SPACE}]{{1,32}}"
)


def count_words(texts: Iterable[str], limit: float = math.inf) -> Counter:
    """How often each word of PATTERN occurs, as bytes, in about so many characters of text."""
    words = Counter()
    for text in texts:
        words.update(re.findall(PATTERN, text))
        limit -= len(text)
        if limit <= 0:
            break
    return Counter({word.encode(): n for word, n in words.items()})


def train_bpe(words: Counter, n_tokens: int) -> list[bytes]:
    """
    The n_tokens byte strings of a BPE: the 256 bytes, then one merge after the other, each of the
    most frequent pair of neighbours (among equals the pair of the smallest ids). Fewer if every
    word is one token. Raises ValueError below 256.

    The counts are kept, and a merge visits only the places of its pair (arXiv:1508.07909 counts
    anew, and trains the same merges).
    """
    if n_tokens < 256:
        raise ValueError(f"a byte-level BPE has at least 256 tokens, got {n_tokens}")
    tokens = [bytes([i]) for i in range(256)]
    id_of = {token: i for i, token in enumerate(tokens)}
    # All words in one row, with a gap before each. A merge leaves its token in the first place of
    # the pair and a gap in the second; before and after lead to the neighbours.
    GAP, ids, weights = -1, array("i"), array("q")
    for word, n in sorted(words.items()):
        ids.extend([GAP, *word])
        weights.extend([n] * (len(word) + 1))
    ids.append(GAP)
    before, after = array("i", range(-1, len(ids) - 1)), array("i", range(1, len(ids) + 1))
    counts, places = Counter(), defaultdict(lambda: array("i"))  # of a pair: how often, and where
    for i in range(len(weights)):
        if ids[i] != GAP and ids[i + 1] != GAP:
            counts[ids[i], ids[i + 1]] += weights[i]
            places[ids[i], ids[i + 1]].append(i)
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
        new = id_of.setdefault(token, len(tokens))
        if new == len(tokens):
            tokens.append(token)
        changed = set()
        for i in sorted(places.pop(pair)):  # from the left: aaa becomes (aa)a
            j = after[i]
            if (ids[i], ids[j]) != pair:  # a merge has taken one of them
                continue
            left, right, n = before[i], after[j], weights[i]
            ids[i], ids[j], after[i], before[right] = new, GAP, right, i
            for place, old, now in (
                (left, (ids[left], pair[0]), (ids[left], new)),
                (i, (pair[1], ids[right]), (new, ids[right])),
            ):
                if GAP not in now:
                    counts[old] -= n
                    counts[now] += n
                    places[now].append(place)
                    changed.add(now)
        del counts[pair]
        for now in changed:
            heapq.heappush(heap, (-counts[now], now))
    return tokens


def make_spec(name: str, pattern: str, tokens: list[bytes]) -> dict:
    return {
        "name": name,
        "pat_str": pattern,
        "special_tokens": {END_OF_TEXT: len(tokens)},
        "mergeable_ranks": [base64.b64encode(token).decode() for token in tokens],
    }


def bpe_spec(words: Counter, vocab_size: int) -> dict:
    """A trained tokenizer of vocab_size ids, end-of-text last. Raises for too few words."""
    tokens = train_bpe(words, vocab_size - 1)
    if len(tokens) < vocab_size - 1:
        what = f"this text has only enough words for vocab_size={len(tokens) + 1}"
        raise ValueError(f"{what}, got {vocab_size}: lower vocab_size, or use more text")
    return make_spec(f"bpe-{vocab_size}", PATTERN, tokens)


def gpt2_spec() -> dict:
    """GPT-2's BPE kept to 49,152 ids. tiktoken fetches it once, or reads TIKTOKEN_CACHE_DIR."""
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the network raises
        what = f"cannot fetch GPT-2's vocabulary ({type(error).__name__})"
        raise ValueError(f"{what}: connect to the network, or set TIKTOKEN_CACHE_DIR") from error
    by_rank = sorted(gpt2._mergeable_ranks.items(), key=lambda item: item[1])
    return make_spec("gpt2-49152", gpt2._pat_str, [token for token, _ in by_rank[:49151]])


def spec_bytes(spec: dict) -> bytes:
    """The content of tiktoken.json."""
    return json.dumps(spec, indent=0).encode()


def digest(spec: dict) -> str:
    """SHA-256 of tiktoken.json, by which a dataset and a checkpoint know their tokenizer."""
    return hashlib.sha256(spec_bytes(spec)).hexdigest()


def read_spec(folder: str | Path) -> dict:
    path = Path(folder) / FILE_NAME
    spec = try_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    if spec is None:
        raise ValueError(f"{path} is missing or damaged: copy it from the dataset")
    return spec


def load_encoding(spec: dict) -> tiktoken.Encoding:
    ranks = {base64.b64decode(token): i for i, token in enumerate(spec["mergeable_ranks"])}
    return tiktoken.Encoding(**spec | {"mergeable_ranks": ranks})


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """The ids (n,) of a text, in which nothing is special: a literal <|endoftext|> is text."""
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except ValueError:  # a very long run of white space: GPT-2's pattern runs out of stack
        parts = re.split(r"(\s{1000}(?=\s))", text)  # none of them cuts a word
        return np.concatenate([encoding.encode_to_numpy(p, disallowed_special=()) for p in parts])


def spelled(spec: dict) -> list[bytes]:
    """The bytes of each id, (V,); those of end-of-text are its name."""
    tokens = [base64.b64decode(token) for token in spec["mergeable_ranks"]]
    return tokens + [name.encode() for name in spec["special_tokens"]]


def token_bytes(spec: dict) -> np.ndarray:
    """How many bytes of text each id stands for, (V,) int64; end-of-text stands for none."""
    lengths = [len(token) for token in spelled(spec)]
    lengths[-len(spec["special_tokens"]) :] = [0] * len(spec["special_tokens"])
    return np.array(lengths, dtype=np.int64)
