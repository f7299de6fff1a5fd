# 401,142,720 parameters with a code, 448,328,640 with a table: the shape of SmolLM-360M,
# with as many key as query heads.
# 8 billion tokens on one GPU of 24 GB or more. Untested; train.py --plan says how long.
from config.canonical_30m import *  # noqa: F403

run_name = "360m"
n_layer = 32
n_head = 15
n_embd = 960
n_inner = 2560
tokens_per_iter = 2**19
batch_size = 4
max_iters = 15259  # x 2^19 tokens = 8 billion
warmup_iters = 500
decay_iters = 3052
