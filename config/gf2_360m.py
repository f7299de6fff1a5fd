# config/canonical_360m.py with another input, and nothing else changed.
from config.canonical_360m import *

input_mode = "gf2"
