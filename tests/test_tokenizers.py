"""data/tokenizers.py: the merges equal a naive trainer's, and every text comes back."""

import random
import re
import resource
import string
import time
from collections import Counter

import numpy as np
import pytest
import tiktoken
from conftest import assert_clean_error, run, texts

from data.tokenizers import PATTERN, bpe_spec, count_words, encode, gpt2_spec, load_encoding, token_bytes, train_bpe

ODD = "naïve café, can't — 12345 it's\t  two  spaces\n\n\nend 😀 <|endoftext|> \x00\x1c\x85 日 _x_y "


def naive_bpe(words: Counter, n_tokens: int) -> list[bytes]:
    """Count all pairs anew, merge the most frequent one (among equals: smallest ids), repeat."""
    tokens = [bytes([i]) for i in range(256)]
    spelled = {word: list(word) for word in words}
    while len(tokens) < n_tokens:
        counts = Counter()
        for word, ids in spelled.items():
            for pair in zip(ids, ids[1:]):
                counts[pair] += words[word]
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], [-i for i in pair]))
        joined = tokens[best[0]] + tokens[best[1]]
        new = tokens.index(joined) if joined in tokens else len(tokens)
        for word, ids in spelled.items():
            out, open_pair = [], False
            for i in ids:
                if open_pair and (out[-1], i) == best:  # greedy from the left
                    out[-1], open_pair = new, False
                else:
                    out.append(i)
                    open_pair = True
            spelled[word] = out
        if new == len(tokens):
            tokens.append(joined)
    return tokens


@pytest.mark.parametrize("seed", range(4))
def test_merges_equal_a_naive_trainers(seed):
    draw = random.Random(seed)
    letters = "ab" if seed % 2 else "abcde\u00e9"  # few letters make many ties and runs like aaaa
    text = "".join(draw.choice(letters + " ") for _ in range(3000)) + " ".join(texts(20)) + ODD
    words = count_words([text])
    assert train_bpe(words, 420) == naive_bpe(words, 420)


def random_unicode(seed: int, n: int = 400) -> str:
    draw = random.Random(seed)
    pick = [
        lambda: chr(draw.randrange(128)),
        lambda: chr(draw.randrange(0x80, 0x3000)),
        lambda: chr(draw.randrange(0x10000, 0x1FFFF)),
        lambda: draw.choice(" \n\t\r'ab19_-"),
        lambda: draw.choice(" \n^a1\u4e00") * draw.randrange(100),  # longer than a word can be
    ]
    return "".join(draw.choice(pick)() for _ in range(n))


@pytest.mark.parametrize("seed", range(10))
def test_python_and_tiktoken_split_a_text_alike(seed):
    text = random_unicode(seed) + ODD
    pieces = re.findall(PATTERN, text)
    assert "".join(pieces) == text, "the pattern leaves something out"
    assert max(map(len, pieces)) <= 33  # with the space before it
    # A vocabulary that has every piece whole: tiktoken then gives exactly one id per piece.
    longer = sorted({p.encode() for p in pieces} - {bytes([i]) for i in range(256)})
    ranks = {bytes([i]): i for i in range(256)} | {p: 256 + i for i, p in enumerate(longer)}
    encoding = tiktoken.Encoding("whole", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert encoding.decode_tokens_bytes(encoding.encode_ordinary(text)) == [p.encode() for p in pieces]


def test_every_text_comes_back_and_end_of_text_is_text():
    spec = bpe_spec(count_words(texts(200)), 300)
    encoding = load_encoding(spec)
    runs = [f"start{sign * 10**6}end" for sign in " ^\n"]
    for text in [ODD, "", "\ufeff", *texts(5), *runs, *(random_unicode(seed) for seed in range(5))]:
        ids = encode(encoding, text).tolist()
        assert ids == encoding.encode_ordinary(text)
        assert encoding.decode(ids) == text and encoding.eot_token not in ids
        assert token_bytes(spec)[np.array([*ids, 299])].sum() == len(text.encode())
    assert encoding.n_vocab == 300 and encoding.eot_token == 299


def any_text(kind: str, n: int) -> str:
    """n bytes of a script without spaces, and of what else is one word to a pattern of words."""
    draw = random.Random(0)
    if kind == "chinese":
        signs = [chr(0x4E00 + int(draw.paretovariate(0.5)) % 5000) for _ in range(n // 3)]
        return "\n".join("".join(signs[i : i + 500]) for i in range(0, len(signs), 500))
    letters = {"DNA": "ACGT", "digits": string.digits, "base64": string.ascii_letters + string.digits + "+/"}
    return "".join(draw.choices(letters[kind], k=n))


@pytest.mark.parametrize("kind", ["chinese", "DNA", "base64", "digits"])
def test_words_without_spaces_are_trained_and_encoded_soon(kind):
    text, t0 = any_text(kind, 333_000), time.process_time()  # a megabyte in less than 30 s
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spec = bpe_spec(count_words([text]), 1300 if kind == "digits" else 2048)
    encoding = load_encoding(spec)
    assert encoding.decode(encode(encoding, text)) == text
    dt = time.process_time() - t0
    gb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert dt < 10 and gb < 0.17, (dt, gb)


def test_gpt2_kept_to_its_first_ranks():
    try:
        encoding, gpt2 = load_encoding(gpt2_spec()), tiktoken.get_encoding("gpt2")
    except ValueError as error:  # names TIKTOKEN_CACHE_DIR
        pytest.skip(str(error))
    assert encoding.n_vocab == 49152 and encoding.eot_token == 49151
    cut_off = gpt2.decode([50000])  # falls into the two that GPT-2 would have merged last
    for text in [ODD, "Hello world, the quick brown fox.", cut_off, *map(random_unicode, range(5))]:
        ids, full = encoding.encode_ordinary(text), gpt2.encode_ordinary(text)
        assert encoding.decode(ids) == text
        if max(full) < 49151:  # no rank that was cut off: the same ids
            assert ids == full
    for sign in " \n^a":  # a run that is too long for GPT-2's pattern
        text = f"start {sign * 10**6} end"
        assert encoding.decode(encode(encoding, text)) == text


def test_gpt2_out_of_reach_is_a_clean_error(tmp_path):
    (tmp_path / "a.txt").write_text("One. " * 9000, encoding="utf-8")
    args = [f"--input={tmp_path / 'a.txt'}", f"--data_dir={tmp_path / 'd'}", "--tokenizer=gpt2-49152"]
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    result = run("-m", "data.text", *args, **env)
    assert_clean_error(result, "GPT-2's vocabulary", "TIKTOKEN_CACHE_DIR")
    assert not (tmp_path / "d").exists()
