"""
Corpora as token ids on disk, and the other files of a run. One module, one concept:

    pydocs.py       Python's own documentation        python -m data.pydocs
    text.py         your own text                     python -m data.text --input=PATH
    fineweb_edu.py  pages of the web from the hub     python -m data.fineweb_edu --tokens=1e7
    prepare.py      documents -> shards               shards.py        their format and order
    tokenizers.py   byte-pair encoding                bigram.py        the baseline
    benchmarks.py   tasks and their items             runs.py          a run's folder
    hugging_face.py the export
"""
