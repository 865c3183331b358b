"""Training data, from files to batches.

`sources` reads documents, `tokenizer` turns them into tokens, `prepare` writes those to a `token_store` on
disk, `windows` divides the store into samples, `order` permutes them, and `samples` makes batches.
"""
