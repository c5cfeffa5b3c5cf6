"""`tilecrew demo`: a small Qwen3-Next with random weights, run by tilecrew, checked against transformers' torch path.

    model.py        text, tokenizer, configuration, weights
    agreement.py    prefill and decode on both paths, logits compared
    ranks.py        the same with experts spread over processes
    timing.py       prefill time against sequence length, whole model and operator alone
    picture.py      the measurements as a PNG
    run.py          the command: order of the steps, progress, tables

Needs the extras `cli` and `transformers`.
"""
