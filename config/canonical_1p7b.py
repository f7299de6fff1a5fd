# The paper's run: 1.7 billion parameters on 100 billion tokens, in the shape of SmolLM-1.7B.
# A cluster, days; train.py --plan says how many.
input_mode = "canonical"
run_name = "1p7b"
data_dir = "data/fineweb_edu"

vocab_size = 49152  # gpt2-49152
block_size = 2048
n_layer = 24
n_head = 32
n_embd = 2048
n_inner = 8192

tokens_per_iter = 2**21
batch_size = 8  # fits 80 GB when compiled
max_iters = 47684  # x 2^21 tokens = 100 billion
learning_rate = 5e-4
warmup_iters = 2000
decay_iters = 9537

log_interval = 10
eval_interval = 1000
eval_tokens = 2**24
save_interval = 1000
keep_checkpoints = 2
