# config/canonical_1p7b.py with another input, and nothing else changed.
from config.canonical_1p7b import *  # noqa: F403

input_mode = "learned"
