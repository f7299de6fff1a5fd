"""
Corpora as token ids on disk. One module a concept, one module a corpus:

    shards.py       the format, and the order in which training reads it
    tokenizers.py   byte-pair encoding: train one, take GPT-2's, keep it beside the tokens
    prepare.py      documents -> train and validation files
    bigram.py       the baseline: what counting neighbours can do
    pydocs.py       the documentation that comes with Python      python -m data.pydocs
    text.py         your own text files, folders and JSONL        python -m data.text --input=PATH
    fineweb_edu.py  FineWeb-Edu: up to a trillion tokens          python -m data.fineweb_edu --tokens=1e7
"""
