# config/canonical_30m.py with another input, and nothing else changed.
from config.canonical_30m import *

input_mode = "gf2"
