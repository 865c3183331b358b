"""From files to batches: documents become tokens on disk once, tokens become samples, samples come in an order.

`sources` reads documents, `tokenizer` and `chat` turn them into tokens, `prepare` writes those into a `store` on disk,
`samples` cuts the store into samples and makes batches, `order` says which sample comes when.
"""
