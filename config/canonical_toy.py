# A 2-million-parameter model of Python's own documentation, for a laptop: minutes on two CPU cores.
# The input is the paper's canonical code, the bits of the token id.
input_mode = "canonical"
run_name = "toy"

vocab_size = 4096
block_size = 128
n_layer = 4
n_head = 3
n_embd = 192

tokens_per_iter = 2048
batch_size = 16
max_iters = 1200
learning_rate = 3e-3
warmup_iters = 100
decay_iters = 400

eval_interval = 200
save_interval = 200
