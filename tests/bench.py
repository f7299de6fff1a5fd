"""
Benchmarks, run by hand: ratios within one run, never absolute times.

    python tests/bench.py [--train] [--loss] [--corpus] [--eval]

Without a name it runs all but --eval.

    train    tokens per second against transformers' Llama: same shapes, optimizer, threads; eager and,
             where a C++ compiler is found, compiled
    loss     head and loss at V = 49,152: memory and speed against logits-then-cross-entropy
    corpus   tokens per second of data.text, from parquet files to shards, against tiktoken alone on one
             core; and its memory for a small and a large corpus
    eval     items per second on the files of BENCHMARK_DIR against lm-evaluation-harness on the export
"""

import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F

from model import GPT, GPTConfig, head_loss


def times_in_turns(functions: dict, repeats: int) -> dict[str, list[float]]:
    """Seconds of each function, which take turns, so that a busy moment meets all of them."""
    times = {name: [] for name in functions}
    for turn in range(repeats + 2):
        for name, function in functions.items():
            t0 = time.perf_counter()
            function()
            if turn >= 2:  # the first two are a warm-up
                times[name].append(time.perf_counter() - t0)
    return times


def ratio(slow: list[float], fast: list[float]) -> str:
    """The median over the turns of slow / fast, with its range."""
    ratios = sorted(a / b for a, b in zip(slow, fast))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def bench_train() -> None:
    import transformers

    compiler = any(map(shutil.which, ("c++", "g++", "clang++", "cl")))
    shapes = {"C=512": (512, 6, 8, 256, 8, 4096), "toy": (88, 6, 2, 128, 8, 2048)}
    for name, (C, L, H, T, B, V) in shapes.items():
        model = GPT(GPTConfig(input_mode="learned", vocab_size=V, block_size=T, n_layer=L, n_head=H, n_embd=C))
        llama = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=V, hidden_size=C, intermediate_size=4 * C, num_hidden_layers=L,
                num_attention_heads=H, max_position_embeddings=T, tie_word_embeddings=False, use_cache=False,
            )
        )  # fmt: skip
        x, y = torch.randint(V, (2, B, T), generator=torch.Generator().manual_seed(0))
        for compiled in [False, True] if compiler else [False]:
            ours, theirs = (torch.compile(m) if compiled else m for m in (model, llama))

            def step(params, loss_of, optimizer):
                loss_of().backward()
                torch.nn.utils.clip_grad_norm_(params, 1.0)
                optimizer.step()
                optimizer.zero_grad()

            def llama_loss():
                return F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())

            optimizers = [m.parameters() for m in (model, llama)]
            optimizers = [torch.optim.AdamW(p, lr=1e-4, fused=True) for p in optimizers]
            times = times_in_turns(
                {
                    "ours": lambda: step(list(model.parameters()), lambda: ours(x, y), optimizers[0]),
                    "llama": lambda: step(list(llama.parameters()), llama_loss, optimizers[1]),
                },
                repeats=20,
            )
            gflop = model.flops_per_token() * B * T / 1e9
            ours_s, llama_s = map(statistics.median, times.values())
            print(
                f"train {name} {'compiled' if compiled else 'eager'}: ratio "
                f"{ratio(times['llama'], times['ours'])} (ours {gflop / ours_s:.0f} GFLOP/s, "
                f"transformers {gflop / llama_s:.0f})"
            )


def status_gb(key: str) -> float:
    """What Linux says of this process's memory: RssAnon, VmRSS, VmHWM (its peak), in GB."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024 / 1e9


def resident() -> float:
    """This process's anonymous memory in GB."""
    return status_gb("RssAnon")


def peak_of(function) -> tuple[float, float]:
    """The function's result and the memory in GB by which it grew, at its peak."""
    before, peak, done = resident(), 0.0, threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = function()
    finally:
        done.set()
        thread.join()
    return result, peak


V, C, N = 49152, 512, 8192  # of the head and the loss


def loss_ways() -> dict:
    """Forward and backward of head and loss, the plain way and ours: functions that return the loss."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=generator, requires_grad=True)
    weight = torch.randn(V, C, generator=generator).mul(0.02).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)

    def run(loss_of) -> float:
        x.grad = weight.grad = None
        loss = loss_of()
        loss.backward()
        return loss.item()

    return {
        "plain": lambda: run(lambda: F.cross_entropy(x @ weight.T, targets)),
        "ours": lambda: run(lambda: head_loss(x, weight, targets, "mean")),
    }


def loss_and_peak(way: str) -> tuple[float, float]:
    return peak_of(loss_ways()[way])


def bench_loss() -> None:
    # Each in a process of its own: memory that an earlier run freed would hide what a later one takes.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        losses, peaks = zip(*pool.map(loss_and_peak, ["plain", "ours"], chunksize=1))
    times = times_in_turns(loss_ways(), repeats=3)
    print(
        f"loss V={V} C={C} N={N}: memory {peaks[0]:.2f} GB plain, {peaks[1]:.2f} ours "
        f"(1/{peaks[0] / peaks[1]:.0f}); speed ratio {ratio(times['plain'], times['ours'])}; relative "
        f"difference of the loss {abs(losses[0] - losses[1]) / losses[0]:.1e}"
    )


def write_corpus(folder: Path, copies: int) -> list[str]:
    """The documents of the default corpus again and again, in parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from data.pydocs import read_documents

    texts = [text for text in read_documents() if len(text) < 30_000] * 10  # as long as web pages
    folder.mkdir()
    for i in range(copies):
        pq.write_table(pa.table({"text": texts}), folder / f"{i:03}.parquet", row_group_size=1000)
    return texts * copies


def prepare_corpus(source: str) -> None:
    from data.text import main

    with tempfile.TemporaryDirectory() as out, open(os.devnull, "w") as null, redirect_stdout(null):
        main([f"--input={source}", f"--data_dir={out}/d", "--tokenizer=gpt2-49152"])


def corpus_peak(folder: str) -> float:
    return peak_of(lambda: prepare_corpus(folder))[1]


def bench_corpus() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from data.tokenizers import gpt2_spec, load_encoding

    encoding, cores = load_encoding(gpt2_spec()), os.cpu_count()

    def bare(texts: list[str], n: int) -> None:
        """tiktoken alone in n threads: the most that this machine can give, as busy as it is."""

        def encode(part: list[str]) -> None:
            for text in part:
                encoding.encode_to_numpy(text, disallowed_special=())

        with ThreadPoolExecutor(n) as pool:
            list(pool.map(encode, [texts[i::n] for i in range(n)]))

    with tempfile.TemporaryDirectory() as folder:
        texts = write_corpus(Path(folder) / "large", 4)
        write_corpus(Path(folder) / "small", 1)
        n_bytes = sum(len(text.encode()) for text in texts)
        times = times_in_turns(
            {
                "tiktoken": lambda: [encoding.encode_ordinary(text) for text in texts],
                "bare": lambda: bare(texts, cores),
                "ours": lambda: prepare_corpus(f"{folder}/large"),
            },
            repeats=3,
        )
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            peaks = pool.map(corpus_peak, [f"{folder}/small", f"{folder}/large"], chunksize=1)
    ours, bare_rate = (ratio(times["tiktoken"], times[name]) for name in ("ours", "bare"))
    print(
        f"corpus {n_bytes / 1e6:.0f} MB, {cores} threads: {ours} times tiktoken's encode_ordinary on "
        f"one core (the threads without reading and writing: {bare_rate}); memory {peaks[1]:.2f} GB, "
        f"{peaks[0]:.2f} for a quarter of it"
    )


def bench_eval() -> None:
    from pytest import MonkeyPatch
    from test_harness import REAL, export_model, harness_model, harness_scores, local_rows

    from config.machine import Precision, Runtime
    from data.benchmarks import TASKS, make_requests, read_items
    from data.tokenizers import gpt2_spec, load_encoding
    from eval import score

    spec, rt = gpt2_spec(), Runtime(Precision("cpu", "float32", False, False, False))
    cfg = GPTConfig(vocab_size=49152, block_size=512, n_layer=5, n_head=5, n_embd=160)
    model, encoding = GPT(cfg), load_encoding(spec)
    print(f"eval: {model.n_params() / 1e6:.1f} M parameters, {len(REAL)} tasks of 200 items")
    with tempfile.TemporaryDirectory() as folder, MonkeyPatch.context() as patch:
        export_model(model, spec, Path(folder, "hf"))
        lm = harness_model(f"{folder}/hf", cfg.block_size, 8)
        for name in REAL:

            def ours(name: str = name) -> None:
                items = read_items(TASKS[name], os.environ["BENCHMARK_DIR"])
                score(model, make_requests(items, name, encoding, cfg.block_size)[0], name, rt)

            def theirs(name: str = name) -> None:
                harness_scores(lm, {name: local_rows(name)}, patch)

            times = times_in_turns({"ours": ours, "harness": theirs}, repeats=3)
            print(f"eval {name}: items per second / the harness's {ratio(times['harness'], times['ours'])}")


if __name__ == "__main__":
    names = [arg.lstrip("-") for arg in sys.argv[1:]] or ["train", "loss", "corpus"]
    for name in names:
        globals()[f"bench_{name}"]()
