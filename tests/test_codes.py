"""codes.py: every id has a code of its own, in every setting, and finds the way back."""

import itertools
import random

import pytest
import torch
from conftest import ROOT, run
from torch import nn

import codes
from codes import (
    FixedTokenCode,
    FrozenTable,
    gf2_inverse,
    make_code,
    min_bits,
    normal,
    random_invertible,
    recode,
    token_bits,
)

ALL_IDS = torch.arange(2**16)


def test_bits_are_least_significant_first_and_as_few_as_possible():
    assert token_bits(torch.tensor([5, 8]), 4).tolist() == [[1, 0, 1, 0], [0, 0, 0, 1]]
    for t in (0, 1, 255, 1000, 32767, 32768, 49150, 49151, 65535):
        assert token_bits(torch.tensor(t), 16).tolist() == [int(b) for b in f"{t:016b}"[::-1]]
    for V, K in {2: 1, 3: 2, 4: 2, 5: 3, 4096: 12, 49152: 16, 65536: 16}.items():
        assert min_bits(V) == K


def test_recoding_by_hand():
    # A c = (1*0 + 1*1, 0*0 + 1*1) = (1, 1), and (1, 1) + (1, 0) = (0, 1) mod 2
    A, b = torch.tensor([[1, 1], [0, 1]]), torch.tensor([1, 0])
    assert recode(torch.tensor([0, 1]), A, b).tolist() == [0, 1]
    # The docstring's example
    A = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 1]])
    assert recode(token_bits(torch.tensor(5), 3), A, torch.zeros(3).long()).tolist() == [1, 0, 0]
    assert gf2_inverse(A).tolist() == [[1, 1, 0], [0, 1, 0], [1, 1, 1]]
    assert FixedTokenCode(8, 9)(torch.tensor(5)).tolist() == [1, 0, 1] * 3
    for mode in ("canonical", "gf2"):  # token 0 reads a zero vector
        assert not FixedTokenCode(8, 9, mode)(torch.tensor(0)).any()
        assert FixedTokenCode(8, 9, mode, symbols="pm1")(torch.tensor(0)).tolist() == [-1] * 9


def test_a_matrix_is_singular_exactly_when_its_rows_span_fewer_than_2_to_the_k_sums():
    draw = random.Random(0)
    random_rows = [[draw.getrandbits(K) for _ in range(K)] for K in [2, 3, 4, 5] * 15]
    # The first has determinant 2: invertible over the reals, singular mod 2 (its rows add up to zero).
    for rows in [[0b011, 0b110, 0b101], *random_rows]:
        span, K = {0}, len(rows)
        for row in rows:
            span |= {other ^ row for other in span}
        A = torch.tensor([[row >> k & 1 for k in range(K)] for row in rows])
        if len(span) == 2**K:
            gf2_inverse(A)
        else:
            with pytest.raises(ValueError, match="no inverse over GF"):
                gf2_inverse(A)


@pytest.mark.parametrize("K", [1, 2, 5, 12, 16, 31])
def test_inverse_times_matrix_is_identity(K):
    A = random_invertible(K, torch.Generator().manual_seed(K))
    inverse = gf2_inverse(A)
    eye = torch.eye(K, dtype=A.dtype)
    assert torch.equal(A @ inverse % 2, eye) and torch.equal(inverse @ A % 2, eye)


def test_draws_are_uniform_over_the_invertible_matrices():
    # GL(2, 2) has 6 members. 6,000 draws: each near 1,000, standard deviation 29.
    generator = torch.Generator().manual_seed(0)
    counts = {}
    for _ in range(6000):
        key = tuple(random_invertible(2, generator).flatten().tolist())
        counts[key] = counts.get(key, 0) + 1
    singular = [m for m in itertools.product((0, 1), repeat=4) if (m[0] * m[3] + m[1] * m[2]) % 2 == 0]
    assert len(counts) == 6 and not set(singular) & set(counts)
    assert all(abs(n - 1000) < 150 for n in counts.values()), counts


SETTINGS = [
    dict(input_mode=mode, symbols=symbols, scale=scale, shift=shift, recodings=R, n_bits=bits)
    for mode in ("canonical", "gf2")
    for symbols, scale in (("01", 1.0), ("pm1", 0.02))
    for shift in (False, True)
    for R, bits in ((1, 0), (3, 0), (1, 20))
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_every_id_has_its_own_code_and_the_way_back(setting):
    period = (setting["n_bits"] or 16) * setting["recodings"]
    code = FixedTokenCode(2**16, period, seed=3, **setting)
    vectors = code(ALL_IDS)
    assert torch.equal(code.decode(vectors), ALL_IDS)
    # Distinct over the first K columns already, counted without the module's own inverse.
    ones = (vectors[:, : setting["n_bits"] or 16] > vectors.mean()).long()
    assert len(torch.unique((ones * 2 ** torch.arange(ones.size(1))).sum(1))) == 2**16
    low, high = (0.0, setting["scale"]) if setting["symbols"] == "01" else (-0.02, 0.02)
    assert torch.equal(torch.unique(vectors), torch.tensor([low, high]))


def test_a_code_equals_a_slow_loop():
    code = FixedTokenCode(300, 36, "gf2", seed=5, shift=True, recodings=2, symbols="pm1", scale=0.5)
    A, b = code.A.tolist(), code.b.tolist()
    assert any(b), "the shift is drawn"
    for t in (0, 1, 77, 299):
        bits = [t >> k & 1 for k in range(9)]
        rows = [(sum(a * c for a, c in zip(row, bits)) + shift) % 2 for row, shift in zip(A, b)]
        assert code(torch.tensor(t)).tolist() == [0.5 if r else -0.5 for r in rows] * 2


def test_canonical_is_gf2_with_the_identity_and_each_seed_has_its_own_code():
    A, b = make_code("canonical", 16)
    assert torch.equal(A, torch.eye(16, dtype=A.dtype)) and not b.any()
    ids = torch.tensor([0, 1, 49151])
    assert torch.equal(FixedTokenCode(49152, 16)(ids), token_bits(ids, 16).float())
    first, again, other = (make_code("gf2", 16, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_more_recodings_raise_the_rank_of_the_input_past_the_bits():
    rank = {}
    for R in (1, 2, 4):
        code = FixedTokenCode(4096, 48, "gf2", recodings=R)
        rank[R] = int(torch.linalg.matrix_rank(code(torch.arange(4096)).double()))
    assert rank[1] == 12 and rank[1] < rank[2] < rank[4] <= 48, rank


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(n_embd=100), r"multiple of 16 .*, got 100: use 96 or 112"),
        (dict(n_embd=96, recodings=4), "multiple of 64 .*: use 64 or 128"),
        (dict(n_embd=8), "multiple of 16 .*, got 8: use 16$"),
        (dict(n_bits=15), "n_bits must be 0 or 16 to 62 for 49152 ids, got 15"),
        (dict(input_mode="binary"), "must be canonical or gf2, got 'binary'"),
        (dict(symbols="0/1"), "symbols 01 or pm1, .* got '0/1'"),
        (dict(scale=0.0), "scale above 0 up to 1e6"),
        (dict(scale=1e300), "scale above 0 up to 1e6"),
        (dict(recodings=0), "recodings of at least 1"),
    ],
)
def test_a_code_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FixedTokenCode(**(dict(vocab_size=49152, n_embd=2048) | changes))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)])
def test_it_is_a_drop_in_for_an_embedding(shape):
    ids = torch.randint(1000, shape, generator=torch.Generator().manual_seed(0))
    code, table = FixedTokenCode(1000, 40), nn.Embedding(1000, 40)
    assert list(code.parameters()) == []
    assert code(ids).shape == table(ids).shape and code(ids).dtype == table(ids).dtype
    with torch.no_grad():
        table.weight.copy_(code(torch.arange(1000)))
    assert torch.equal(code(ids), table(ids))


def test_it_moves_with_to_and_stays_exact_under_autocast():
    ids = torch.arange(4096)
    code = FixedTokenCode(4096, 24, "gf2", symbols="pm1")
    exact = code(ids)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        moved = FixedTokenCode(4096, 24, "gf2", symbols="pm1").to(dtype)
        assert moved(ids).dtype == dtype and torch.equal(moved(ids).float(), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(code(ids).float(), exact)
    assert code.to("meta")(ids.to("meta")).shape == (4096, 24)


def test_a_checkpoint_carries_its_code():
    ids = torch.arange(8)
    saved = FixedTokenCode(8, 6, "gf2", seed=1, symbols="pm1", scale=2.0, shift=True)
    other = FixedTokenCode(8, 6, "gf2")
    assert not torch.equal(other(ids), saved(ids))
    other.load_state_dict(saved.state_dict())
    assert torch.equal(other(ids), saved(ids)) and torch.equal(other.decode(other(ids)), ids)


def test_running_codes_prints_what_the_file_says_and_draws(tmp_path):
    source = (ROOT / "codes.py").read_text()
    result = run("-W", "error", str(ROOT / "codes.py"), "5", cwd=tmp_path)
    pasted = source.split("# python codes.py 5 prints:\n")[1]
    assert result.stdout == "".join(line[2:] + "\n" for line in pasted.splitlines())
    A, _ = make_code("gf2", 16)
    by_hand = "".join(str((int(row[0]) + int(row[2])) % 2) for row in A)  # 5 has bits 0 and 2
    assert f"gf2        {by_hand}" in result.stdout
    assert (tmp_path / "out" / "codes.png").stat().st_size > 10_000
    for word in ("five", "50000", "-1"):
        with pytest.raises(SystemExit, match=f"codes.py: error: token ids go from 0 to 49151, got {word}$"):
            codes.main([word])


def test_codes_needs_nothing_but_torch(tmp_path):
    (tmp_path / "codes.py").write_text((ROOT / "codes.py").read_text())
    code = "import sys; from codes import FixedTokenCode; assert 'config' not in sys.modules"
    assert run("-c", code, cwd=tmp_path).returncode == 0


def test_spelling_is_the_sum_over_runs_of_bytes():
    def draw(*parts):
        return sum(normal(3, part, (8,)) for part in parts)

    tokens = [b"", b"a", b"\xffab", b"a"]
    table = FrozenTable(tokens, 8, "spelling", 0.5, seed=3).weight
    runs = ["\xff", "a", "b", "\u0100\xff", "\xffa", "ab", "b\u0101", "\u0100\xffa", "\xffab", "ab\u0101"]
    torch.testing.assert_close(table[0], 0.5 * draw("\u0100\u0101"))
    torch.testing.assert_close(table[1], 0.5 / 4**0.5 * draw("a", "\u0100a", "a\u0101", "\u0100a\u0101"))
    torch.testing.assert_close(table[2], 0.5 / 10**0.5 * draw(*runs))
    own = FrozenTable(tokens, 8, "spelling", 0.5, seed=3, own=True).weight
    torch.testing.assert_close(own[2], 0.5 / 11**0.5 * draw(*runs, "token 2"))
    assert torch.equal(table[1], table[3]) and not torch.equal(own[1], own[3])
    alone = FrozenTable(tokens, 8, "random", 0.5, seed=3).weight
    torch.testing.assert_close(alone[3], 0.5 * draw("token 3"))


def test_spelling_brings_like_words_together_and_keeps_all_apart():
    words = [b"cat", b" cats", b"scatter", b"dog", *(b"-" * n for n in range(1, 33)), b"<|endoftext|>"]
    table = FrozenTable(words, 4096, "spelling", 0.1).weight
    near = torch.nn.functional.cosine_similarity(table[0], table[1:4], dim=-1)
    # c a t ca at cat of 10 and 16 parts; t twice of 10 and 22 (2 x 2 + 20 squared); nothing
    torch.testing.assert_close(near, torch.tensor([6 / 160**0.5, 7 / 240**0.5, 0.0]), atol=0.05, rtol=0)
    assert len(table.unique(dim=0)) == len(words)
    assert table[:4].std().item() == pytest.approx(0.1, rel=0.03)
    other = FrozenTable(words, 4096, "spelling", 0.1, seed=1).weight
    assert torch.nn.functional.cosine_similarity(table, other).abs().max() < 0.1


def test_normal_numbers_depend_on_seed_and_name_alone():
    x = normal(0, "a", (100, 1000))
    assert abs(x.mean()) < 0.02 and x.std().item() == pytest.approx(1, rel=0.01)
    assert torch.equal(x, normal(0, "a", (100, 1000)))
    assert not (x == normal(1, "a", (100, 1000))).any() and not (x == normal(0, "b", (100, 1000))).any()
