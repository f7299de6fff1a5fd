# config/canonical_135m.py with another input, and nothing else changed.
from config.canonical_135m import *

input_mode = "learned"
