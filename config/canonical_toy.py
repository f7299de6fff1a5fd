# A model of a million weights on Python's own documentation, for a laptop: minutes on two cores.
# All settings have their defaults; the input is the token's own bits.
input_mode = "canonical"
run_name = "toy"
