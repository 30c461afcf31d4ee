"""Views of FSDP2's parameter groups; only this file and `torch_internals` access private attributes of FSDP2.

`torch_internals` checks at attachment that these attributes exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain, count, takewhile
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sdp4bit.collectives.host import all_reduce_on_host
from sdp4bit.collectives.sections import Range, Section, common_ranges, take_ranges
from sdp4bit.engines.fsdp2.row import Row, RowParam
from sdp4bit.engines.fsdp2.subclasses import extends_gather, plain_values, subclass_gather
from sdp4bit.engines.fsdp2.torch_internals import (
    Comm,
    HybridMeshInfo,
    Module,
    Param,
    ParamGroup,
    RootContext,
    param_groups_of,
    param_groups_of_state,
    reduced_in,
)

_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module", "_orig_mod")
_ATTACHED = "_sdp4bit_is_attached"  # an attribute of FSDP2's parameter groups
_BIT_PATTERNS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DEFAULT_COMMS = ("DefaultAllGather", "DefaultReduceScatter")
_SYMMETRIC, _OF_PROCESS_GROUP = "set_symm_mem_for_comm", "set_allocate_memory_from_process_group_for_comm"
_STAGING_COMMS = {
    "SymmMemAllGather": _SYMMETRIC,
    "SymmMemReduceScatter": _SYMMETRIC,
    "ProcessGroupAllocAllGather": _OF_PROCESS_GROUP,
    "ProcessGroupAllocReduceScatter": _OF_PROCESS_GROUP,
}
"""FSDP2's communication classes with special memory, and the method that selects each."""


def clean_name(name: str) -> str:
    """Remove the names of transparent wrappers from a module's or parameter's name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PREFIXES)


@dataclass(frozen=True, kw_only=True)
class ParamView(RowParam):
    """A param with FSDP2's record of its parameter."""

    fsdp_param: Param
    dtype: torch.dtype  # when gathered

    @property
    def sharded(self) -> DTensor:
        """The parameter that optimizers and state dicts see; FSDP2 may replace it."""
        return cast(DTensor, self.fsdp_param.sharded_param)

    @property
    def local(self) -> Tensor:
        """This rank's shard without padding, detached."""
        return self.sharded.to_local().detach()

    @cached_property
    def is_on_all_ranks(self) -> bool:
        """Whether no rank's shard is empty."""
        dim, ranks = self.fsdp_param.fsdp_placement.dim, self.fsdp_param.mesh_info.shard_mesh_size
        return self.fsdp_param.padded_sharded_param_size[dim] * (ranks - 1) < self.fsdp_param._orig_size[dim]

    @property
    def owner(self) -> tuple[nn.Module, str]:
        """The module that the parameter is registered on, and its name there."""
        return self.fsdp_param._module_info.module, self.fsdp_param._module_info.param_name

    @property
    def split_over(self) -> dict[tuple[int, ...], ProcessGroup]:
        """The process groups that tensor parallelism splits the parameter over, by ranks."""
        # Every mesh dimension that is not FSDP2's counts, including those of other parallelisms.
        data = set(self.fsdp_param.mesh_info.mesh.mesh.flatten().tolist())
        mesh, placements = self.sharded.device_mesh, self.sharded.placements
        groups = [mesh.get_group(dim) for dim, each in enumerate(placements) if not each.is_replicate()]
        by_ranks = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
        return {ranks: group for ranks, group in by_ranks.items() if not data.issuperset(ranks)}

    def local_view(self, row: Tensor) -> Tensor:
        """View this parameter's shard in a row [n] of its group, without padding."""
        values = row[self.start : self.end]
        if self.holds_bits:
            values = values.view(self.dtype)
        padded = values.view(self.fsdp_param.padded_sharded_param_size)
        dim = self.fsdp_param.fsdp_placement.dim
        return padded.narrow(dim, 0, self.local.size(dim) if self.local.numel() else 0)

    def to_dtensor(self, row: Tensor) -> DTensor:
        """Copy this parameter's shard of a row into a DTensor sharded like the parameter."""
        like = self.sharded
        local = self.local_view(row).clone().view(self.local.shape)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def tensor_version(tensor: DTensor) -> tuple[int, int, int]:
    """Return a value that changes with every edit of a DTensor or its local tensor."""
    local = tensor._local_tensor
    return _counter(tensor), id(local) if local.numel() else 0, _counter(local)


def _counter(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class CommObjects(NamedTuple):
    """The objects that an FSDP2 parameter group communicates through."""

    all_gather: Comm
    reduce_scatter: Comm
    replicate: ProcessGroup | None  # for the all-reduce of HSDP; None without HSDP


class FSDPView:
    """One FSDP2 parameter group: the parameters that are gathered and reduced together."""

    def __init__(
        self,
        module: Module,
        group: ParamGroup,
        *,
        name: str,
        module_name: str,
        module_names: Mapping[int, str],
        siblings: Sequence[ParamGroup],
        root: str,
    ) -> None:
        """Read the attributes that do not change.

        Args:
            module_names: names of all modules of the model by id().
            siblings: all groups of the module, in the order in which they are gathered.
            root: prefix of the names below one of several local roots; "" for a single root.
        """
        self.name = name or "(root)"
        self.module_name = module_name or "(root)"
        self.module = module
        self.root = root
        self._module_state = module._get_fsdp_state()
        self._fsdp_group = group
        self._siblings = siblings
        self._module_names = module_names
        info = group.mesh_info
        self.process_group = info.shard_process_group
        self.ranks = tuple(dist.get_process_group_ranks(self.process_group))
        # HSDP: gradients are also all-reduced over the replicate dimension, that is, over the ranks that hold
        # the same shard as this one.
        self.is_hybrid = group._is_hsdp
        self.replicate: ProcessGroup | None = None
        self.replicate_ranks: tuple[int, ...] = (dist.get_rank(),)
        self.sharing_ranks = frozenset(self.ranks)  # including HSDP's replicate dimension
        index, size = 0, 1  # in the replicate dimension
        if self.is_hybrid:
            hybrid = self._hybrid_info
            # Not `replicate_process_group`, which another handle may have replaced.
            self.replicate = hybrid.mesh.get_group(cast(int, hybrid.replicate_mesh_dim))
            self.replicate_ranks = tuple(dist.get_process_group_ranks(self.replicate))
            self.sharing_ranks = frozenset(hybrid.mesh.mesh.flatten().tolist())
            index, size = hybrid.replicate_mesh_rank, hybrid.replicate_mesh_size
        # The number of this rank's data among `data_ranks`, for the rounding of gradients. Tensor-parallel
        # peers see the same data, so their copies of a parameter must be rounded identically.
        self.data_ranks = info.shard_mesh_size * size
        self.replicate_data_ranks = range(info.shard_mesh_rank, self.data_ranks, info.shard_mesh_size)
        self.data_rank = self.replicate_data_ranks[index]
        if self.has_subclasses and self.is_unsharded and self.is_idle:
            module.reshard()  # a subclass shows its all-gather inputs only while it is sharded
        self._dtypes = self._main_dtypes()

    def _main_dtypes(self) -> list[torch.dtype]:
        return [param.sharded_param.dtype for param in self._fsdp_group.fsdp_params]

    def note_dtypes(self) -> bool:
        """Return whether the parameters have other dtypes than before; derived values are then new.

        FSDP2 reads the dtypes at the first forward, and refuses later changes.

        Raises:
            ValueError: the row has another geometry, for which no replica was made.
        """
        dtypes = self._main_dtypes()
        if dtypes == self._dtypes:
            return False
        places = [(param.start, param.end, param.holds_bits) for param in self.params]
        for name in ("params", "row_dtype", "row", "copied_over", "_gathers", "has_subclasses"):
            vars(self).pop(name, None)
        if places != [(param.start, param.end, param.holds_bits) for param in self.params]:
            raise ValueError(
                f"parameters of {self.name} got other dtypes after quantize_communication, and others "
                "another place in the row with them: call it after the conversion"
            )
        self._dtypes = dtypes
        return True

    @property
    def device(self) -> torch.device:
        return self._fsdp_group.device

    @property
    def is_unsharded(self) -> bool:
        return self._fsdp_group.is_unsharded

    @property
    def is_idle(self) -> bool:
        """Whether neither forward nor backward of the group's modules is running."""
        return self._fsdp_group._training_state.name == "IDLE"

    @property
    def has_partial_gradients(self) -> bool:
        """Whether FSDP2 holds gradients of HSDP that it has reduced over the shards only."""
        return self._fsdp_group._partial_reduce_output is not None

    @property
    def is_attached(self) -> bool:
        """Whether a handle communicates for the group, also while it is switched off."""
        return getattr(self._fsdp_group, _ATTACHED, False)

    @is_attached.setter
    def is_attached(self, attached: bool) -> None:
        setattr(self._fsdp_group, _ATTACHED, attached)

    def find_unattached(self, roots: Iterable[nn.Module]) -> list[str]:
        """Return the parameters without a handle below FSDP2's root and these; called during forward."""
        groups = [group for state in self.context.all_states for group in param_groups_of_state(state)]
        # Without a sharded root each block is FSDP2's root of itself, so blocks do not know each other.
        below = (module for root in roots for _, module in named_fsdp_modules(root))
        groups += [group for module in below for group in param_groups_of(cast(Module, module))]
        missing = [group for group in groups if not getattr(group, _ATTACHED, False)]
        return list(dict.fromkeys(self._name_of(param) for group in missing for param in group.fsdp_params))

    @property
    def reduces_gradients(self) -> bool:
        """Whether the next backward reduces gradients instead of only accumulating them."""
        return self._fsdp_group.reduce_grads

    @property
    def context(self) -> RootContext:
        """The context that the FSDP modules of one root share from the first forward on."""
        return self._module_state._state_ctx

    @property
    def forward_leader(self) -> object | None:
        """State of the outermost FSDP module whose forward is running; None outside of forward."""
        return self.context.iter_forward_root

    def leads(self, leader: object) -> bool:
        """Return whether this is the first group of the module with that state."""
        return self._siblings[0] is self._fsdp_group and self._module_state is leader

    @property
    def ranks_after_forward(self) -> int | None:
        """`reshard_after_forward` if it is an int: backward gathers over that many ranks."""
        if not self._fsdp_group._use_post_forward_mesh:
            return None
        return self._fsdp_group.post_forward_mesh_info.shard_mesh_size

    @cached_property
    def params(self) -> list[ParamView]:
        """The parameters in the order of the row."""
        result, start = [], 0
        for param, (dtypes, _) in zip(self._fsdp_group.fsdp_params, self._gathers, strict=True):
            module, own_name = param._module_info.module, param._module_info.param_name
            dtype = next(iter(dtypes)) if len(dtypes) == 1 else param.sharded_param.dtype
            row_dtype, numel = self.row_dtype or dtype, param.padded_sharded_param_size.numel()
            end = start + numel * dtype.itemsize // row_dtype.itemsize
            # bitsandbytes packs 4-bit codes into any dtype; read as floats they may be NaN.
            is_packed = own_name == "weight" and getattr(module, "quant_state", None) is not None
            view = ParamView(
                name=self._name_of(param),
                start=start,
                end=end,
                numel=numel,
                dim=param.sharded_param.dim(),
                holds_bits=dtype != row_dtype or is_packed,
                fsdp_param=param,
                dtype=dtype,
            )
            result.append(view)
            start = end
        return result

    def requiring_grad(self) -> frozenset[int]:
        """Return the indices of the parameters that require a gradient now."""
        # Asked for several times in a step, so without a call per parameter.
        flags = [param.sharded_param.requires_grad for param in self._fsdp_group.fsdp_params]
        return self.row.everything if all(flags) else frozenset([i for i, each in enumerate(flags) if each])

    def has_gradient(self, chosen: Collection[int]) -> bool:
        """Return whether a param that no rank holds empty has a gradient, of those chosen by index."""
        params = [self.params[index] for index in chosen]
        return any(each.is_on_all_ranks and each.sharded.grad is not None for each in params)

    def _name_of(self, param: Param) -> str:
        owner = self._module_names.get(id(param._module_info.module))
        if owner is None:  # outside of the modules that were passed; FSDP2 names it from the first forward on
            return clean_name(param._param_fqn or param._module_info.param_name)
        return clean_name(f"{owner}.{param._module_info.param_name}".lstrip("."))

    @cached_property
    def row_dtype(self) -> torch.dtype | None:
        """The dtype in which most trained values are gathered; other parameters are bits in it.

        None if that is no floating-point dtype, or if some shard does not align with all dtypes.
        """
        params, dtypes = self._fsdp_group.fsdp_params, self.param_dtypes
        if len(dtypes) == 1:
            return next(iter(dtypes))
        widest = max(dtype.itemsize for dtype in dtypes)
        values: dict[torch.dtype, int] = {}  # trained values, or all of them if nothing is trained
        trains = any(param.sharded_param.requires_grad for param in params)
        for param, (gathered, _) in zip(params, self._gathers, strict=True):
            numel = param.padded_sharded_param_size.numel()
            if any(numel * dtype.itemsize % widest for dtype in gathered):
                return None
            if param.sharded_param.requires_grad or (not trains and param.sharded_param.is_floating_point()):
                for dtype in gathered:
                    values[dtype] = values.get(dtype, 0) + numel
        # Ties are broken by name, so that all ranks choose the same.
        dtype = max(values, key=lambda each: (values[each], str(each)), default=torch.uint8)
        return dtype if dtype.is_floating_point else None

    @cached_property
    def row(self) -> Row:
        """The geometry of the row."""
        # The kinds differ if tensor parallelism splits some parameters and copies others.
        return Row(self.params, kinds=[frozenset(param.split_over) for param in self.params])

    @property
    def value_ranges(self) -> list[Range] | None:
        """The ranges of the row that hold values and not bits; None for the entire row."""
        return self.row.value_ranges

    @cached_property
    def copied_over(self) -> list[ProcessGroup]:
        """The process groups of tensor-parallel ranks that hold copies of some parameters only.

        All of these ranks must refresh the replica at the same time and in the same way.
        """
        if not self.row.has_kinds:
            return []
        by_ranks = {ranks: group for param in self.params for ranks, group in param.split_over.items()}
        return list(by_ranks.values())

    def weight_sections(self, *, unit: int, separate: bool) -> tuple[Section, ...]:
        """Return the sections of a row of weights; see `Row`."""
        return self.row.weight_sections(unit=unit, separate=separate)

    def gradient_sections(self, numel: int, *, unit: int, separate: bool) -> tuple[Section, ...] | None:
        """Return the sections of a row of gradients [numel]; see `Row`."""
        order, trainable = self._gradient_order, self.requiring_grad()
        return self.row.gradient_sections(
            numel, order=order, trainable=trainable, unit=unit, separate=separate
        )

    @property
    def _gradient_order(self) -> Sequence[int]:
        """The order of the parameters in a row of gradients, which differs from `params` since torch 2.15.

        FSDP2 then sorts them by the dtype of their gradients, from the first forward on.
        """
        order: Sequence[int] = getattr(self._fsdp_group, "_reduce_scatter_param_indices", ())
        return order or range(len(self.params))

    @property
    def shard_numel(self) -> int:
        """Values of `row_dtype` in one rank's row, FSDP2's own padding of uneven shards included."""
        return self.params[-1].end

    @cached_property
    def _gathers(self) -> list[tuple[frozenset[torch.dtype], str]]:
        """The gathered dtypes of each parameter, and the reason if a tensor subclass is left to FSDP2."""
        gathers = []
        for param in self._fsdp_group.fsdp_params:
            dtype, policy = param.sharded_param.dtype, param.mp_policy.param_dtype
            usual = policy if policy is not None and dtype.is_floating_point else dtype
            dtypes, reason = subclass_gather(param, name=self._name_of(param))
            gathers.append((dtypes or frozenset((usual,)), reason))
        return gathers

    @property
    def rounds_weights(self) -> bool:
        """Whether main shards are more precise than gathered weights."""
        return any(param.dtype != param.sharded.dtype for param in self.params)

    @property
    def param_dtypes(self) -> set[torch.dtype]:
        """The dtypes of gathered parameters; FSDP2 gathers several dtypes as bytes."""
        return {dtype for dtypes, _ in self._gathers for dtype in dtypes}

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 reduces the group's gradients."""
        params = self._fsdp_group.fsdp_params
        trained = [param for param in params if param.sharded_param.requires_grad] or params[:1]
        return reduce(torch.promote_types, map(reduced_in, trained))

    @cached_property
    def has_subclasses(self) -> bool:
        """Whether a tensor subclass customizes its all-gather."""
        return any(
            extends_gather(cast(DTensor, param.sharded_param)._local_tensor)
            for param in self._fsdp_group.fsdp_params
        )

    @property
    def subclass_reason(self) -> str:
        """The reason why a tensor subclass's all-gather is left to FSDP2; "" for none."""
        return next((reason for _, reason in self._gathers if reason), "")

    @property
    def comms(self) -> CommObjects:
        """The objects that the group currently communicates through."""
        return CommObjects(
            all_gather=self._fsdp_group._all_gather_comm,
            reduce_scatter=self._fsdp_group._reduce_scatter_comm,
            replicate=self._hybrid_info.replicate_process_group if self.is_hybrid else None,
        )

    @property
    def _hybrid_info(self) -> HybridMeshInfo:
        return cast(HybridMeshInfo, self._fsdp_group.mesh_info)

    @property
    def custom_comms(self) -> list[str]:
        """Class names of communication hooks that are not FSDP2's own."""
        names = [type(comm).__name__ for comm in (self.comms.all_gather, self.comms.reduce_scatter)]
        return [name for name in names if name not in (*_DEFAULT_COMMS, *_STAGING_COMMS)]

    @property
    def staging_comms(self) -> dict[str, str]:
        """The methods that selected special memory for FSDP2's "weights" and "gradients"."""
        comms = {"weights": self.comms.all_gather, "gradients": self.comms.reduce_scatter}
        setters = {kind: _STAGING_COMMS.get(type(comm).__name__, "") for kind, comm in comms.items()}
        return {kind: setter for kind, setter in setters.items() if setter}

    def main_shard(self, dtype: torch.dtype) -> Tensor:
        """Copy this rank's main shard [n] as the next all-gather would send it.

        Args:
            dtype: dtype of the result; params of bits survive in `row_dtype` only.
        """
        # The same tensors that FSDP2's copy-in reads: 1-D, padded, in the dtype of the main weights, and on
        # the host with CPU offload.
        pieces, device = [], self.device
        for param in self.params:
            data = param.fsdp_param._sharded_param_data
            if self.has_subclasses:
                data = plain_values(data)
            if param.holds_bits and self.row_dtype is not None:
                data = data.to(device=device, dtype=param.dtype).view(self.row_dtype)
            if data.dtype != dtype or data.device != device:  # `to` costs as much if nothing changes
                data = data.to(device=device, dtype=dtype)
            pieces.append(data)
        return torch.cat(pieces)

    def gathered_shard(self) -> Tensor | None:
        """Copy this rank's main shard [n] in the dtype of the row; None unless that is floating-point."""
        dtype = self.row_dtype
        if dtype is None or self.subclass_reason or not dtype.is_floating_point:
            return None
        return self.main_shard(dtype)

    def sample_main(self, ranges: Sequence[Range]) -> Tensor:
        """Return these ascending ranges of this rank's main shard, concatenated, in fp32."""
        pieces: list[Tensor] = []
        for param in self.params:
            common = common_ranges(ranges, [(param.start, param.end)])
            own = [(start - param.start, end - param.start) for start, end in common]
            pieces += take_ranges(plain_values(param.fsdp_param._sharded_param_data), own) if own else []
        return torch.cat([piece.to(self.device, non_blocking=True) for piece in pieces]).float()

    def fingerprints(self) -> Tensor:
        """Return the sum of the bit patterns of this rank's shard of each parameter, int64 [params]."""
        # Not of values, because an integer sum does not depend on the order and NaN equals itself.
        shards = [plain_values(param.local).reshape(-1) for param in self.params]
        patterns = [shard.view(_BIT_PATTERNS[shard.element_size()]) for shard in shards]
        return torch.stack([pattern.sum(dtype=torch.int64) for pattern in patterns]).to(self.device)

    def install(self, comms: CommObjects) -> CommObjects:
        """Make the group communicate through these objects; return the previous ones."""
        previous = self.comms
        # FSDP2's setters write the same attributes but refuse modules with several parameter groups, which a
        # mesh per parameter creates (docs/upstream.md).
        self._fsdp_group._all_gather_comm = comms.all_gather
        self._fsdp_group._reduce_scatter_comm = comms.reduce_scatter
        if comms.replicate is not None:
            # FSDP2's set_all_reduce_hook does not replace the all-reduce of HSDP. Groups may share a mesh
            # record, so this group gets its own.
            self._fsdp_group.mesh_info = copy(self._fsdp_group.mesh_info)
            self._hybrid_info.replicate_process_group = comms.replicate
        return previous


def reduce_over_copies(
    values: Tensor, views: Sequence[FSDPView], *, host: ProcessGroup | None, op: dist.ReduceOp.RedOpType
) -> None:
    """Reduce values in place over the tensor-parallel ranks that hold copies of some parameters of a group.

    Called after the data-parallel ranks have agreed, so that all tensor-parallel ranks take the same refresh.

    Args:
        values: [n, ...] on the CPU, so that no GPU is waited for; a row for each of the n groups.
        views: of the groups; those with copies must be the same on all of these ranks.
        host: the job's process group for tensors on the CPU; None if all groups take them.
    """
    for copied_over in dict.fromkeys(each for view in views for each in view.copied_over):
        chosen = [index for index, view in enumerate(views) if copied_over in view.copied_over]
        part = values[chosen]
        ranks = sorted(dist.get_process_group_ranks(copied_over))
        what = "agreement of tensor-parallel ranks"
        all_reduce_on_host(part, host or copied_over, ranks=ranks, op=op, what=what)
        values[chosen] = part


def named_fsdp_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every FSDP module of the model, including the model itself."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield clean_name(name), cast(nn.Module, module)


def find_groups(roots: Sequence[nn.Module]) -> list[FSDPView]:
    """Return the parameter groups of the models, in the order of `named_modules`.

    Raises:
        ValueError: the FSDP2 modules of the models have no parameters.
    """
    groups: list[FSDPView] = []
    seen: set[int] = set()
    for part, root in enumerate(roots):
        prefix = f"part{part}." if len(roots) > 1 else ""
        module_names = {id(m): prefix + name for name, m in root.named_modules()}
        for name, module in named_fsdp_modules(root):
            own = param_groups_of(cast(Module, module))
            for group in own:
                # fully_shard([a, b]) creates one group for several modules.
                if id(group) in seen or not group.fsdp_params:
                    continue
                seen.add(id(group))
                module_name = group_name = (prefix + name).rstrip(".")
                if len(own) > 1:
                    group_name = _name_among(groups, _common_owner(group, module_names))
                groups.append(
                    FSDPView(
                        cast(Module, module),
                        group,
                        name=group_name,
                        module_name=module_name,
                        module_names=module_names,
                        siblings=own,
                        root=prefix,
                    )
                )
    if roots and not groups:
        raise ValueError("the FSDP2 modules of this model hold no parameters")
    return groups


def _common_owner(group: ParamGroup, module_names: Mapping[int, str]) -> str:
    """Return the name of the innermost module that contains all parameters of a group."""
    owners = [
        clean_name(module_names.get(id(p._module_info.module), "")).split(".") for p in group.fsdp_params
    ]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))
    return ".".join(parts[0] for parts in shared)


def _name_among(views: Sequence[FSDPView], name: str) -> str:
    """Return the name, with a number appended if another group has it."""
    taken = {view.name for view in views}
    name = name or "(root)"
    numbered = (f"{name} ({number})" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in taken)
