"""Corpora, tokenizers and samples of `sdp4bit pretrain`.

The readers of `.bin/.idx` files, blends and tokenizers are our own, although Megatron-Core has them.
Importing `megatron.core.datasets.indexed_dataset` (0.16.1) takes 7.0 s of CPU time and 428 MB, torch alone
2.6 s and 219 MB, and `data.indexed` 0.2 s and 29 MB. It imports 22 packages beside those of torch, such as
triton and tensorboard. `preprocess` needs none of them, and no torch. Its samples are in another order
(docs/data.md), and its builders need an initialized process group. Its tokenizers need transformers (1.6 s);
`tokenizers` alone reads the same files. The format of the files is stable: a test compares ours with
Megatron-Core's byte by byte.
"""
