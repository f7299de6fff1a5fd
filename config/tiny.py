# The smallest model that has every part: tests only, seconds on one core.
run_name = "tiny"
vocab_size = 512
block_size = 32
n_layer = 2
n_embd = 36
tokens_per_iter = 256
batch_size = 4
max_iters = 20
warmup_iters = 5
decay_iters = 5
log_interval = 1
eval_interval = 10
save_interval = 10
device = "cpu"
