# 401,142,720 parameters with a code, 448,328,640 with a table: the shape of SmolLM-360M,
# with as many key as query heads.
# 8 billion tokens on one GPU of 24 GB or more. Untested; train.py --plan says how long.
input_mode = "canonical"
run_name = "360m"
data_dir = "data/fineweb_edu"

vocab_size = 49152  # gpt2-49152
block_size = 2048
n_layer = 32
n_head = 15
n_embd = 960
n_inner = 2560

tokens_per_iter = 2**19
batch_size = 4
max_iters = 15259  # x 2^19 tokens = 8 billion
learning_rate = 1e-3
warmup_iters = 500
decay_iters = 3052

log_interval = 10
eval_interval = 500
eval_tokens = 2**22
save_interval = 1000
