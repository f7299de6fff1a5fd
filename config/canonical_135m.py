# 147,786,048 parameters with a code, 176,097,600 with a table: the shape of SmolLM-135M,
# with as many key as query heads.
# 3 billion tokens on one GPU of 24 GB or more. Untested; train.py --plan says how long.
input_mode = "canonical"
run_name = "135m"
data_dir = "data/fineweb_edu"

vocab_size = 49152  # gpt2-49152
block_size = 2048
n_layer = 30
n_head = 9
n_embd = 576
n_inner = 1536

tokens_per_iter = 2**19
batch_size = 8
max_iters = 5722  # x 2^19 tokens = 3 billion
learning_rate = 1e-3
warmup_iters = 500
decay_iters = 1144

log_interval = 10
eval_interval = 500
eval_tokens = 2**22
save_interval = 1000
