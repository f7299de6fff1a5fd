"""
Benchmarks, run by hand: ratios within one run, never absolute times.

    python tests/bench.py [--train] [--loss] [--corpus] [--eval]

Without a name it runs all but --eval.

    train    tokens per second against transformers' Llama: same shapes, optimizer, threads; eager and,
             where a C++ compiler is found, compiled
    loss     head and loss at V = 49,152: memory and speed against logits-then-cross-entropy
    corpus   tokens per second of data.text, from parquet files to shards, against tiktoken alone on one core
    eval     scoring the files of BENCHMARK_DIR against lm-evaluation-harness at its batch size 8
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.nn.functional as F

from config.machine import Precision, Runtime
from model import GPT, GPTConfig, head_loss


def compare(title: str, theirs, ours, repeats: int) -> None:
    """Print theirs / ours in seconds, its median and range. They take turns, so that a busy moment meets both."""
    times = {theirs: [], ours: []}
    for turn in range(repeats + 2):
        for function in (theirs, ours):
            t0 = time.perf_counter()
            function()
            if turn >= 2:  # the first two are a warm-up
                times[function].append(time.perf_counter() - t0)
    ratios = sorted(a / b for a, b in zip(times[theirs], times[ours]))
    median, seconds = statistics.median(ratios), statistics.median(times[ours])
    print(f"{title}: {median:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), ours {seconds:.3f} s", flush=True)


def training_step(model: torch.nn.Module, loss_of):
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)

    def step() -> None:
        loss_of().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bench_train() -> None:
    import transformers

    for name, (C, H, T, V) in {"toy": (88, 2, 128, 2048), "C = 512": (512, 8, 256, 4096)}.items():
        model = GPT(GPTConfig(input_mode="learned", vocab_size=V, block_size=T, n_layer=6, n_head=H, n_embd=C))
        llama = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=V, hidden_size=C, intermediate_size=4 * C, num_hidden_layers=6,
                num_attention_heads=H, max_position_embeddings=T, tie_word_embeddings=False, use_cache=False,
            )
        )  # fmt: skip
        x, y = torch.randint(V, (2, 8, T), generator=torch.Generator().manual_seed(0))
        flops = model.flops_per_token() * x.numel()
        print(f"{name}: {flops / 1e9:.1f} GFLOP a step, {torch.get_num_threads()} threads")
        for way in ["eager", "compiled"] if shutil.which("g++") else ["eager"]:
            ours, theirs = (torch.compile(m) if way == "compiled" else m for m in (model, llama))

            def llama_loss(theirs=theirs):
                return F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())

            steps = training_step(llama, llama_loss), training_step(model, lambda ours=ours: ours(x, y))
            compare(f"train {name} {way}, transformers / ours", *steps, repeats=20)


def loss_ways() -> dict:
    """Forward and backward of head and loss, the plain way and ours."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 512, generator=generator, requires_grad=True)
    weight = torch.randn(49152, 512, generator=generator).mul(0.02).requires_grad_()
    targets = torch.randint(49152, (8192,), generator=generator)
    return {
        "plain": lambda: F.cross_entropy(x @ weight.T, targets).backward(),
        "ours": lambda: head_loss(x, weight, targets, "mean").backward(),
    }


def loss_memory(way: str) -> float:
    """The memory in GB by which a process grows."""
    import resource

    work, before = loss_ways()[way], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6


def bench_loss() -> None:
    # Each in a process of its own: memory that an earlier one freed would hide what a later one takes.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        plain, ours = pool.map(loss_memory, ["plain", "ours"], chunksize=1)
    print(f"loss: {plain:.2f} GB plain, {ours:.2f} ours")
    compare("loss, plain / ours", *loss_ways().values(), repeats=5)


def bench_corpus() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from data.pydocs import read_documents
    from data.text import main
    from data.tokenizers import gpt2_spec, load_encoding

    encoding = load_encoding(gpt2_spec())
    texts = [text for text in read_documents() if len(text) < 30_000] * 10  # as long as web pages

    def prepare() -> None:
        with tempfile.TemporaryDirectory() as out, open(os.devnull, "w") as null, redirect_stdout(null):
            main([f"--input={folder}", f"--data_dir={out}/d", "--tokenizer=gpt2-49152"])

    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(pa.table({"text": texts}), f"{folder}/a.parquet", row_group_size=1000)
        compare(
            f"corpus, tiktoken on one core / data.text on {os.cpu_count()}",
            lambda: [encoding.encode_ordinary(text) for text in texts],
            prepare,
            repeats=3,
        )


def bench_eval() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from data.benchmarks import TASKS, make_requests, read_items
    from data.hugging_face import export
    from data.tokenizers import gpt2_spec, load_encoding
    from eval import score

    spec, rt = gpt2_spec(), Runtime(Precision("cpu", "float32", False, False, False))
    cfg = GPTConfig(vocab_size=49152, block_size=512, n_layer=5, n_head=5, n_embd=160)
    model, encoding = GPT(cfg).requires_grad_(False), load_encoding(spec)
    print(f"eval: {model.n_params() / 1e6:.1f} M parameters")
    with tempfile.TemporaryDirectory() as folder:
        table = {"wte.weight": model.wte(torch.arange(cfg.vocab_size))}
        export(model.state_dict() | table, vars(cfg), spec, "", f"{folder}/hf")
        lm = HFLM(f"{folder}/hf", device="cpu", dtype="float32", batch_size=8, max_length=cfg.block_size)
    for name in sorted(file.stem for file in Path(os.environ["BENCHMARK_DIR"]).glob("*.jsonl")):
        items = read_items(TASKS[name], os.environ["BENCHMARK_DIR"])
        instances = [Instance("loglikelihood", {}, pair, 0) for item in items for pair in item.pairs]
        compare(
            f"eval {name}, harness / ours",
            lambda: lm.loglikelihood(instances, disable_tqdm=True),  # both begin with text
            lambda: score(model, make_requests(items, name, encoding, cfg.block_size)[0], name, rt),
            repeats=3,
        )


if __name__ == "__main__":
    for name in [arg.lstrip("-") for arg in sys.argv[1:]] or ["train", "loss", "corpus"]:
        globals()[f"bench_{name}"]()
