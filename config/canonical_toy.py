# A model of a million weights on Python's own documentation, for a laptop: minutes on two cores.
# The input is the paper's canonical code, the bits of the token id.
input_mode = "canonical"
run_name = "toy"

vocab_size = 2048    # 11 bits
block_size = 128
n_layer = 6
n_head = 2
n_embd = 88          # 8 copies of the bits

tokens_per_iter = 1024
batch_size = 8
max_iters = 3000
learning_rate = 3e-3
warmup_iters = 200
decay_iters = 1500

log_interval = 100
eval_interval = 500
save_interval = 500
