# 147,786,048 parameters with a code, 176,097,600 with a table: the shape of SmolLM-135M,
# with as many key as query heads.
# 3 billion tokens on one GPU of 24 GB or more. Untested; train.py --plan says how long.
from config.canonical_1p7b import *  # noqa: F403

run_name = "135m"
n_layer = 30
n_head = 9
n_embd = 576
n_inner = 1536
tokens_per_iter = 2**19
max_iters = 5722  # x 2^19 tokens = 3 billion
learning_rate = 1e-3
warmup_iters = 500
decay_iters = 1144
eval_interval = 500
eval_tokens = 2**22
keep_checkpoints = 1
