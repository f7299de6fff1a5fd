# config/canonical_toy.py with another input, and nothing else changed.
from config.canonical_toy import *  # noqa: F403

input_mode = "gf2"
