"""Settings and node layouts: accepted values are consistent, others are refused by name."""

from __future__ import annotations

import dataclasses
import math
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from sdp4bit.collectives.topology import Nodes, arrange, node_labels
from sdp4bit.config import (
    LEAST_CLIP,
    AuditConfig,
    GradientConfig,
    SDP4BitConfig,
    TelemetryConfig,
    WeightConfig,
)
from sdp4bit.quantization.formats import choices
from tests.quantization.property_cases import PROFILES, hold

# -- settings -----------------------------------------------------------------------------------------

bits = st.sampled_from([*choices(), None])
group_sizes = st.integers(1, 1 << 20).map(lambda blocks: 32 * blocks)
roundings = st.sampled_from(["nearest", "stochastic"])
VALID: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    WeightConfig: {
        "bits": bits,
        "group_size": group_sizes,
        "mode": st.sampled_from(["difference", "direct"]),
        "clip": st.none() | st.floats(LEAST_CLIP, 1),
        "replica": st.sampled_from(["node", "full"]),
    },
    GradientConfig: {
        "intra_bits": bits,
        "inter_bits": bits,
        "intra_group_size": group_sizes,
        "inter_group_size": group_sizes,
        "hadamard": st.booleans(),
        "intra_rounding": roundings,
        "inter_rounding": roundings,
        "exact_own": st.booleans(),
        "pipeline_chunks": st.none() | st.integers(1, 1 << 40),
        "start_step": st.integers(0, 1 << 40),
        "min_numel": st.integers(0, 1 << 40),
        "inside_one_node": st.booleans(),
    },
    SDP4BitConfig: {
        "weights": st.none() | st.builds(WeightConfig, group_size=group_sizes),
        "gradients": st.none() | st.builds(GradientConfig, min_numel=st.integers(0, 99)),
        "separate_parameters": st.booleans(),
        "seed": st.integers(0, 1 << 80),
        "telemetry": st.none() | st.builds(TelemetryConfig, interval=st.integers(1, 99)),
        "audit": st.none() | st.builds(AuditConfig, interval=st.integers(1, 99)),
        "alerts": st.none(),
    },
}
PREFIX = {WeightConfig: "weights.", GradientConfig: "gradients.", SDP4BitConfig: ""}

anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(string.printable, max_size=20)
    | st.binary(max_size=4)
    | st.lists(st.integers(), max_size=2)
    | st.sampled_from(["Nearest", "nearest ", "16", (4,), {"bits": 4}, math.nan, 3.5, 4.0, 8.0, 128.0, 1e300])
    | st.sampled_from([np.int64(4), np.float32(8), np.ones(2), np.array(["nearest", "full"]), object(), int])
)


def is_valid(name: str, value: Any) -> bool:
    """Whether a field takes a value, said once more in other words."""
    is_int = type(value) is int
    if name.endswith("bits"):
        return value is None or (is_int and value in (2, 3, 4, 8)) or (type(value) is float and value == 3.5)
    if name.endswith("group_size"):
        return is_int and value > 0 and value % 32 == 0
    if name in ("hadamard", "exact_own", "inside_one_node", "separate_parameters"):
        return type(value) is bool
    if name in ("pipeline_chunks", "start_step", "min_numel", "seed"):
        is_unset = name == "pipeline_chunks" and value is None
        return is_unset or (is_int and value >= (name == "pipeline_chunks"))
    if name == "clip":
        is_number = isinstance(value, int | float) and type(value) is not bool
        return value is None or (is_number and 0.1 <= value <= 1)
    choices = {"mode": ("difference", "direct"), "replica": ("node", "full")}
    if name in ("weights", "gradients", "telemetry", "audit", "alerts"):
        return value is None
    return isinstance(value, str) and value in choices.get(name, ("nearest", "stochastic"))


@st.composite
def fields_and_values(draw: st.DrawFn) -> tuple[type, dict[str, Any], str, Any]:
    """A class of settings, fields that fit each other, and one of them with any value."""
    cls = draw(st.sampled_from(sorted(VALID, key=lambda cls: cls.__name__)))
    fields = {name: draw(values) for name, values in VALID[cls].items() if draw(st.booleans())}
    return cls, fields, draw(st.sampled_from(sorted(VALID[cls]))), draw(anything)


def check_settings(case: tuple[type, dict[str, Any], str, Any]) -> None:
    """Valid settings are kept as they are; a field that is not valid is named with its value."""
    cls, fields, name, value = case
    kept = cls(**fields)
    assert all(getattr(kept, field) == given for field, given in fields.items())
    assert dataclasses.replace(kept) == kept and hash(dataclasses.replace(kept)) == hash(kept)
    if not is_valid(name, value):
        with pytest.raises(ValueError) as error:
            cls(**fields | {name: value})
        assert str(error.value).startswith(f"{PREFIX[cls]}{name}={value!r}")
    else:
        assert getattr(cls(**fields | {name: value}), name) == value


@PROFILES
def test_any_value_is_kept_or_refused_by_name(profile: settings) -> None:
    hold(profile, fields_and_values(), check_settings)


def test_every_field_is_drawn() -> None:
    for cls, fields in VALID.items():
        assert list(fields) == [field.name for field in dataclasses.fields(cls)]


# -- node layouts -------------------------------------------------------------------------------------


@st.composite
def groups_on_nodes(draw: st.DrawFn) -> tuple[list[int], list[str], int, int]:
    """Ranks of a group, the node of every rank of the job, and the expected layout.

    The job has `inner` ranks of other groups between two of ours, as under tensor parallelism, and `outer`
    groups one after the other, as under pipeline parallelism.
    """
    nodes, per_node = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    inner, outer = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    names = draw(st.permutations([f"node-{i}" for i in range(nodes * outer)]))
    job = [names[i] for i in range(nodes * outer) for _ in range(per_node * inner)]
    first = draw(st.integers(0, outer - 1)) * nodes * per_node * inner + draw(st.integers(0, inner - 1))
    return [first + i * inner for i in range(nodes * per_node)], job, nodes, per_node


def check_node_layout(case: tuple[list[int], list[str], int, int]) -> None:
    """Both levels divide the group: every rank shares its node with some and its local number with others."""
    ranks, labels, nodes, per_node = case
    layout = arrange(ranks, labels)
    assert (layout.ranks, layout.nodes, layout.ranks_per_node) == (tuple(ranks), nodes, per_node)
    assert layout.size == len(ranks)
    intra, inter = layout.members("intra"), layout.members("inter")
    assert [rank for members in intra for rank in members] == ranks
    assert sorted(rank for peers in inter for rank in peers) == ranks
    for node, members in enumerate(intra):
        assert len({labels[rank] for rank in members}) == 1
        for local, peers in enumerate(inter):
            assert set(members) & set(peers) == {ranks[node * per_node + local]}
    for peers in inter:
        assert len({labels[rank] for rank in peers}) == nodes
    # An equal int gives the same.
    size = labels.count(labels[0])
    assert arrange(ranks, node_labels(size, hosts=labels)) == layout
    assert arrange(ranks, node_labels("auto", hosts=labels)) == layout


@PROFILES
def test_groups_on_nodes_are_laid_out(profile: settings) -> None:
    hold(profile, groups_on_nodes(), check_node_layout)


@st.composite
def any_ranks(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Some ranks of a job in any order, on nodes in any order."""
    labels = draw(st.lists(st.integers(0, 3), min_size=1, max_size=10))
    ranks = draw(st.lists(st.integers(0, len(labels) - 1), unique=True, max_size=len(labels)))
    return draw(st.just(ranks) | st.just(sorted(ranks))), labels


def check_any_ranks(case: tuple[list[int], list[int]]) -> None:
    """Ranks that fill their nodes evenly and in order are laid out; others are shown in a table."""
    ranks, labels = case
    members = [labels[rank] for rank in ranks]
    nodes = list(dict.fromkeys(members))
    per_node = len(ranks) // max(1, len(nodes))
    expected = [node for node in nodes for _ in range(per_node)]
    if ranks and ranks == sorted(ranks) and members == expected:
        layout = Nodes(ranks=tuple(ranks), nodes=len(nodes), ranks_per_node=per_node)
        assert arrange(ranks, labels) == layout
        return
    with pytest.raises(ValueError, match="of this data-parallel group are") as error:
        arrange(ranks, labels)
    rows = [line.split() for line in str(error.value).splitlines()[2:]]
    assert rows == [[str(i), str(rank), str(labels[rank])] for i, rank in enumerate(ranks)]


@PROFILES
def test_any_ranks_are_laid_out_or_shown(profile: settings) -> None:
    hold(profile, any_ranks(), check_any_ranks)
