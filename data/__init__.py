"""Files on disk: corpora, tokens, tokenizers, benchmark items, runs, exports. No model."""
