"""
FineWeb-Edu: educational pages of the web, the corpus of the large run. As many tokens as requested.

    python -m data.fineweb_edu --tokens=1e7      20 MB, to try it
    python -m data.fineweb_edu --tokens=1e9      2 GB, to begin with
    python -m data.fineweb_edu --tokens=100e9    200 GB, the data of config/*_1p7b.py

It reads the smallest sample on the Hugging Face hub that is large enough, at a fixed revision. The
id of a document alone decides its side, so the validation documents of a small dataset are never
in the training files of a large one. (`python -m data.text` reads a local copy.)
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tqdm import tqdm

from config import load_config, run_cli, split_args
from data.prepare import PrepareConfig, command_of, prepare

REPO, REVISION = "HuggingFaceFW/fineweb-edu", "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
SAMPLES = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9}  # GPT-2 tokens
ROWS = 1000  # of a file that are read at a time
TRIES = 9  # in a row, to read on from one place; to begin, half of them


@dataclass
class FinewebConfig(PrepareConfig):
    data_dir: str = "data/fineweb_edu"  # folder to write
    tokenizer: Literal["bpe", "gpt2-49152"] = "gpt2-49152"
    tokens: int = 100_000_000_000  # training tokens to write, 2 bytes each
    val_fraction: float = 0.001

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "tokens")


def sample_for(tokens: int) -> str:
    """The smallest configuration on the hub that has so many tokens. 1e9 -> "sample-10BT" """
    return next((name for name, size in SAMPLES.items() if tokens <= size), "default")


def read(tokens: int, file: int, row: int) -> Iterator[tuple[list, str, str]]:
    """([file, next row], id, text) of every document from a row of a file on."""
    import datasets
    import pyarrow.dataset

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # documents() says what goes wrong
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 1  # and tries again
    datasets.config.STREAMING_READ_MAX_RETRIES = 1
    # Arrow's pre_buffer would keep gigabytes of a file, all it has read of it, until the end.
    scan = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
    where = {"split": "train", "revision": REVISION, "streaming": True}
    source = datasets.load_dataset(REPO, sample_for(tokens), fragment_scan_options=scan, **where)
    for i in range(file, source.num_shards):
        part = source.shard(num_shards=source.num_shards, index=i).with_format("arrow")
        for table in part.skip(row).iter(batch_size=ROWS):
            for key, text in zip(table["id"].to_pylist(), table["text"].to_pylist()):
                row += 1
                yield [i, row], key, text
        row = 0


def documents(tokens: int, place: list | None) -> Iterator[tuple[list, str, str]]:
    """
    (place, id, text) of every document after a place, which is [file, next row]. A connection that
    breaks is opened again there, after 1, 2, 4, ... seconds. Raises ValueError after TRIES.
    """
    failures, allowed = 0, TRIES if place else TRIES // 2
    while True:
        try:
            for document in read(tokens, *(place or [0, 0])):
                failures, allowed, place = 0, TRIES, document[0]
                yield document
            return
        except Exception as error:  # hub, HTTP and parquet readers all raise kinds of their own
            failures += 1
            what = f"cannot read {REPO} ({type(error).__name__}: {str(error)[:200]!r})"
            if failures == allowed:
                raise ValueError(f"{what}: check the network; the same command continues") from None
            tqdm.write(f"{what}: trying again in {2 ** (failures - 1)} s")
            time.sleep(2 ** (failures - 1))


def main(argv: list[str]) -> None:
    _, given = split_args(argv, FinewebConfig, __doc__, words_allowed=False)
    cfg = load_config(FinewebConfig, given)
    source = f"{REPO} {sample_for(cfg.tokens)} at {REVISION}"
    command = command_of("data.fineweb_edu", cfg)
    prepare(cfg, lambda place: documents(cfg.tokens, place), source, command, size=2 * cfg.tokens)


if __name__ == "__main__":
    run_cli(main, "data.fineweb_edu")
