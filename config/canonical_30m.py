# 29,496,192 parameters with a code, 48,370,560 with a table: six layers of width 384.
# 1 billion tokens on one GPU of 24 GB or more. Untested; train.py --plan says how long.
input_mode = "canonical"
run_name = "30m"
data_dir = "data/fineweb_edu"

vocab_size = 49152  # gpt2-49152
block_size = 2048
n_layer = 6
n_head = 6
n_embd = 384
n_inner = 1024

tokens_per_iter = 2**18
batch_size = 32
max_iters = 3815  # x 2^18 tokens = 1 billion
learning_rate = 1e-3
warmup_iters = 200
decay_iters = 763

log_interval = 10
eval_interval = 500
eval_tokens = 2**22
save_interval = 1000
