"""Training runs of Megatron-Core's own GPT, data parallelism, optimizer and schedules, over gloo.

Only for processes of their own: `fake_cuda` changes torch for good.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit_megatron import quantize_communication
from tests import toy
from tests.engines import fake_cuda

# Inside one node too: data-parallel ranks of a pipeline stage are neighbours.
LOSSLESS, IDENTITY, QUANTIZED = (
    replace(config, weights=replace(config.weights, replica="full"))
    for config in (toy.LOSSLESS, toy.IDENTITY, toy.QUANTIZED)
)
STOCHASTIC = SDP4BitConfig(
    weights=WeightConfig(replica="full"),
    gradients=GradientConfig(min_numel=0, pipeline_chunks=3, inside_one_node=True),
)
FP16: dict[str, Any] = {
    "transformer": {"fp16": True},
    "optimizer": {
        "initial_loss_scale": 2.0**19,
        "hysteresis": 1,
        "min_loss_scale": 1.0,
        "loss_scale_window": 100,
    },
}
"""The first two steps overflow, and are skipped."""
MOE: dict[str, Any] = {
    "num_moe_experts": 2,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "allgather",
    "add_bias_linear": False,
    "moe_router_load_balancing_type": "none",
}
close = partial(toy.assert_close, gradient=0.05)
"""Of norms that Megatron reports: an error of 0.3 at right angles to a gradient adds 0.044 to its norm."""
EXACT_AND_CLOSE = [(IDENTITY, toy.assert_equal), (QUANTIZED, close)]
LOSSLESS_AND_CLOSE = [(LOSSLESS, toy.assert_equal), (QUANTIZED, close)]
"""Over 2 nodes of 2 ranks gradients are added in another order than by Megatron-Core."""
EXPERT_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
VOCABULARY, BATCH, MICROBATCHES = 64, 2, 2
"""The vocabulary is divided by tensor parallelism; the tokens of `toy` are below it."""


class MegatronRun:
    """One training run; plain Megatron-Core if `config` is None."""

    _made: ClassVar[tuple[object, dict[str, Any]]] = (None, {})
    """The world, and the sizes of Megatron's process groups in it."""

    def __init__(
        self,
        config: SDP4BitConfig | None,
        *,
        topology: int | tuple[int, int] = 2,
        tp: int = 1,
        pp: int = 1,
        chunks: int = 1,
        overlap: bool = False,
        overlap_gather: bool | None = None,
        hidden: int = 48,
        layers: int = 2,
        ddp: dict[str, Any] | None = None,
        transformer: dict[str, Any] | None = None,
        optimizer: dict[str, Any] | None = None,
        fp32_norm: bool = False,
        seed: int = 0,
        attach: bool = True,
    ) -> None:
        """Build and, unless told otherwise, attach.

        Args:
            chunks: model chunks per pipeline stage (virtual stages).
            overlap: reduce gradients during backward; `overlap_gather` the same for parameters and forward.
            fp32_norm: keep the final layer norm in fp32, which gives it a buffer of its own.
        """
        warnings.simplefilter("ignore")
        fake_cuda.install()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        sizes = {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
            **{name: size for name, size in (transformer or {}).items() if name in EXPERT_SIZES},
        }
        made = (dist.group.WORLD, sizes)
        # Megatron destroys none of its process groups, and hundreds of gloo's threads slow down a process.
        if not parallel_state.model_parallel_is_initialized() or made != MegatronRun._made:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=True)
            MegatronRun._made = made
        self.state = parallel_state
        torch.manual_seed(1234 + seed)
        tensor_parallel.random.model_parallel_cuda_manual_seed(1234)
        overlap_gather = overlap if overlap_gather is None else overlap_gather
        self.transformer = self._transformer(hidden, layers, tp, pp, chunks, transformer or {})
        precision = {"fp16": True} if (transformer or {}).get("fp16") else {"bf16": True}
        models = [self._model(chunk, chunks, fp32_norm) for chunk in range(chunks)]
        ddp_config = DistributedDataParallelConfig(
            **{
                "grad_reduce_in_fp32": True,
                "use_distributed_optimizer": True,
                "bucket_size": 20_000,
                "overlap_grad_reduce": overlap,
                "overlap_param_gather": overlap_gather,
                **(ddp or {}),
            }
        )
        self.chunks = [
            DistributedDataParallel(self.transformer, ddp_config, model, disable_bucketing=number > 0)
            for number, model in enumerate(models)
        ]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                **{
                    "optimizer": "adam",
                    "lr": 2e-3,
                    "weight_decay": 0.01,
                    "params_dtype": self.transformer.params_dtype,
                    "clip_grad": 1.0,
                    "use_distributed_optimizer": True,
                    "overlap_param_gather": overlap_gather,
                    **precision,
                    **(optimizer or {}),
                }
            ),
            self.chunks,
        )
        self._finish_config(overlap, overlap_gather)
        self.data = toy.batches(rank=parallel_state.get_data_parallel_rank(), size=BATCH)
        self.eval_data = toy.batches(seed=1, rank=parallel_state.get_data_parallel_rank(), size=BATCH)
        self.losses: list[float] = []
        self.norms: list[torch.Tensor] = []
        """Of the gradients of each step, before they are clipped."""
        self.comm: Any = None
        if config is not None and attach:
            self.attach(config, topology=topology)

    def attach(self, config: SDP4BitConfig, *, topology: int | tuple[int, int]) -> None:
        """Quantize the communication of the run."""
        self.comm = quantize_communication(self.chunks, self.optimizer, config=config, topology=topology)

    def _transformer(
        self, hidden: int, layers: int, tp: int, pp: int, chunks: int, more: dict[str, Any]
    ) -> Any:
        from megatron.core.transformer.transformer_config import TransformerConfig

        dtype = torch.float16 if more.get("fp16") else torch.bfloat16
        return TransformerConfig(
            **{
                "num_layers": layers,
                "hidden_size": hidden,
                "num_attention_heads": 4,
                "ffn_hidden_size": 2 * hidden + 20,
                "use_cpu_initialization": True,
                "bf16": dtype == torch.bfloat16,
                "params_dtype": dtype,
                "pipeline_dtype": dtype,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "masked_softmax_fusion": False,
                "bias_dropout_fusion": False,
                "bias_activation_fusion": False,
                "gradient_accumulation_fusion": False,
                "persist_layer_norm": False,
                "apply_rope_fusion": False,
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
                **more,
            }
        )

    def _model(self, chunk: int, chunks: int, fp32_norm: bool) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.module import Float16Module

        stage = {"vp_stage": chunk} if chunks > 1 else {}
        ends = {"ignore_virtual": False, **stage}
        model = GPTModel(
            self.transformer,
            get_gpt_layer_local_spec(num_experts=self.transformer.num_moe_experts),
            vocab_size=VOCABULARY,
            max_sequence_length=toy.SEQUENCE,
            pre_process=self.state.is_pipeline_first_stage(**ends),
            post_process=self.state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=True,
            position_embedding_type="learned_absolute",
            **stage,
        )
        wrapped = Float16Module(self.transformer, model)
        norm = model.decoder.final_layernorm
        if fp32_norm and norm is not None:
            norm.float()
            norm.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
            norm.register_forward_hook(lambda _, __, output: output.to(self.transformer.params_dtype))
        return wrapped

    def _finish_config(self, overlap: bool, overlap_gather: bool) -> None:
        from megatron.core.distributed import finalize_model_grads

        config = self.transformer
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if overlap:
            several = len(self.chunks) > 1
            config.no_sync_func = [c.no_sync for c in self.chunks] if several else self.chunks[0].no_sync
            if several:
                config.grad_sync_func = [c.start_grad_sync for c in self.chunks]

    def _schedule(self, data: Any, *, forward_only: bool) -> float:
        """Return the mean loss of the micro-batches over the data-parallel ranks; on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        length = toy.SEQUENCE
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        positions = torch.arange(length)[None].repeat(BATCH, 1)

        def loss_of(output: Any) -> Any:
            loss = output.float().mean()
            return loss, {"loss": loss.detach().clone()}

        def forward(iterator: Any, model: Any) -> Any:
            tokens, targets = next(iterator)
            return model(tokens, positions, mask, labels=targets), loss_of

        batches = [next(data) for _ in range(MICROBATCHES)]
        iterators = [iter(batches) for _ in self.chunks]
        results = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=MICROBATCHES,
            seq_length=length,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        loss = torch.zeros(2)
        if self.state.is_pipeline_last_stage(ignore_virtual=True):
            loss[0] = torch.stack([result["loss"] for result in results]).mean()
            loss[1] = 1.0
        dist.all_reduce(loss)
        return float(loss[0] / loss[1])

    def backward(self) -> None:
        """Forward and backward of all micro-batches."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.losses.append(self._schedule(self.data, forward_only=False))

    def step(self) -> bool:
        """One optimizer step; False if it was skipped."""
        is_taken, norm, _ = self.optimizer.step()
        self.norms.append(torch.tensor([float(norm or 0.0)]))
        return bool(is_taken)

    def train(self, steps: int) -> MegatronRun:
        """Whole steps."""
        for _ in range(steps):
            self.backward()
            assert self.step()
        return self

    def evaluate(self) -> float:
        """Return the loss of always the same data, with the parameter sync that Megatron does before."""
        hooked = [chunk for chunk in self.chunks if chunk.use_forward_hook]
        for chunk in hooked:
            chunk.disable_forward_pre_hook()
        self.eval_data = toy.batches(seed=1, rank=self.state.get_data_parallel_rank(), size=BATCH)
        try:
            return self._schedule(self.eval_data, forward_only=True)
        finally:
            for chunk in hooked:
                chunk.enable_forward_pre_hook()

    def finish(self) -> toy.Result:
        """Return all losses, that of an evaluation, and norms of the gradients; replicas are identical."""
        result = toy.Result([*self.losses, self.evaluate()], self.norms)
        self.assert_replicas_identical()
        return result

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return every parameter by name."""
        return {
            f"{number}.{name}": parameter
            for number, chunk in enumerate(self.chunks)
            for name, parameter in chunk.named_parameters()
        }

    def weights(self) -> list[torch.Tensor]:
        """Return a copy of every parameter."""
        return [parameter.detach().clone() for parameter in self.parameters().values()]

    def assert_replicas_identical(self) -> None:
        """All data-parallel ranks hold the same bits of all parameters and of the padding."""
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                for bucket in group.buckets:
                    mine = bucket.param_data.view(torch.uint8).clone()
                    peers = group.intra_distributed_optimizer_instance_group
                    everybody = [torch.empty_like(mine) for _ in range(peers.size())]
                    dist.all_gather(everybody, mine, group=peers)
                    assert all(torch.equal(mine, other) for other in everybody)


def training(config: SDP4BitConfig | None, options: dict[str, Any], steps: int = 3) -> toy.Result:
    """Return the results of a run with these options."""
    return MegatronRun(config, **options).train(steps).finish()


def expected_traffic(run: MegatronRun) -> dict[str, int]:
    """Return bytes and collectives of a step with QUANTIZED, by the layouts of its messages."""
    intra = inter = collectives = 0
    for comm in run.comm.groups:
        numel, nodes, ranks_per_node = comm.view.shard_numel, comm.layout.nodes, comm.layout.ranks_per_node
        difference = MessageLayout(numel=numel, bits=4, group_size=2048).nbytes
        if nodes > 1:
            gradient = MessageLayout(numel=numel, bits=4, group_size=128).nbytes
            inter += (difference + gradient) * (nodes - 1)
        if ranks_per_node > 1:
            gradient = MessageLayout(numel=numel, bits=8, group_size=128, parts=nodes).nbytes
            intra += (nodes * difference + gradient) * (ranks_per_node - 1)
        collectives += 2 * ((nodes > 1) + (ranks_per_node > 1))
    return {"intra_bytes": intra, "inter_bytes": inter, "collectives": collectives}


def save(run: MegatronRun) -> bytes:
    """Return the content of Megatron's checkpoints: model, optimizer entry, and this rank's shards."""
    buffer = io.BytesIO()
    torch.save(
        {
            "model": [chunk.state_dict() for chunk in run.chunks],
            "optimizer": run.optimizer.state_dict(),
            "shards": [
                [part._get_main_param_and_optimizer_states(param) for param in params]
                for part, params in _parts(run)
            ],
        },
        buffer,
    )
    return buffer.getvalue()


def load(run: MegatronRun, saved: bytes, *, communication: bool = True) -> None:
    """Load a saved state; without `communication`, as a plain run would have saved it."""
    state = torch.load(io.BytesIO(saved), weights_only=False)
    for chunk, model in zip(run.chunks, state["model"], strict=True):
        chunk.load_state_dict(model)
    if not communication:
        del state["optimizer"]["optimizer"]["sdp4bit"]
    run.optimizer.load_state_dict(state["optimizer"])
    for (part, params), shards in zip(_parts(run), state["shards"], strict=True):
        for tensors in part.optimizer.state.values():
            tensors["step"] = tensors[
                "step"
            ].clone()  # Megatron-Core gives torch's Adam one for all parameters
        for param, tensors in zip(params, shards, strict=True):
            part._set_main_param_and_optimizer_states(param, tensors)


def _parts(run: MegatronRun) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    """Return the distributed optimizers and the parameters of each; experts have one of their own."""
    return [
        (part, [param for group in part.model_float16_groups for param in group])
        for part in run.optimizer.chained_optimizers
    ]
