"""Drivers of trainers, one module each, for the contract of tests/ecosystem/test_trainers.py.

`train(folder, config, start=None)` trains `STEPS` steps of two micro-batches without (None) or with sdp4bit,
with a checkpoint after `SAVED` steps, or continues from a checkpoint. `checkpoint`, `logged` and `exported`
read the files of a run: the path of the checkpoint, the logged values by name with their steps, and the state
dict for the trainer's users. Trainers that also have DDP take `ddp=True`.

`LEAST` is the least factor of saved bytes, `WITHOUT_STATE` the warning after a checkpoint of plain training
(None if there is none), and `PRELOAD` the modules that the ranks share.
"""
