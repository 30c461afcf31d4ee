"""Keep parameters with copies on all tensor-parallel ranks, such as layer norms and biases, equal.

Each tensor-parallel rank reduces its own buckets. The gradient of a copy is the same on all of them, but its
neighbors in a row and therefore the scales differ, so rounding would make the copies drift apart. After the
data-parallel reduction Megatron-Core averages gradients of parameters with a certain attribute, which this
module sets. For the weights see `BucketReplica`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sdp4bit_megatron.buckets import (
    REPLICATED_DTYPES,
    MegatronBucket,
    replicated_parameters,
    sums_over_tensor_parallel,
    tensor_parallel_group,
)
from sdp4bit_megatron.objects import Chunk

_AVERAGE = "average_gradients_across_tp_domain"


class TensorParallelCopies:
    """The parameters with copies on several tensor-parallel ranks."""

    def __init__(self, chunks: Sequence[Chunk], buckets: Sequence[MegatronBucket]) -> None:
        """Find the parameters; collective over the tensor-parallel groups."""
        dense = {
            id(param)
            for bucket in buckets
            if not bucket.is_expert and bucket.param_dtype in REPLICATED_DTYPES and len(bucket.ranks) > 1
            for param in bucket.parameters
        }
        self.parameters: list[nn.Parameter] = []
        self._unaveraged: list[nn.Parameter] = []
        self._marked: list[nn.Parameter] = []
        self.are_sought = any(tensor_parallel_group(chunk) is not None for chunk in chunks)
        """Whether there are other tensor-parallel ranks."""
        for chunk in chunks:
            group = tensor_parallel_group(chunk)
            if group is None:
                continue
            names = {id(param): name for name, param in chunk.named_parameters()}
            own = [param for param in chunk.parameters() if id(param) in dense]
            copies = replicated_parameters(own, group)
            self.parameters += copies
            self._unaveraged += [
                param
                for param in copies
                if not getattr(param, _AVERAGE, False)
                and not sums_over_tensor_parallel(chunk.config, names[id(param)], param)
            ]

    def install(self, *, gradients_quantized: bool) -> None:
        """Make Megatron average the gradients of the copies if quantization makes them differ."""
        if gradients_quantized:
            for param in self._unaveraged:
                setattr(param, _AVERAGE, True)
                self._marked.append(param)

    def remove(self) -> None:
        for param in self._marked:
            delattr(param, _AVERAGE)
        self._marked = []
