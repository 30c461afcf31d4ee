"""FSDP2 with gradients and weight differences of 2 and 3 bits, on 2 nodes of 2 ranks, by gloo."""

from __future__ import annotations

from dataclasses import replace

from sdp4bit import AlertConfig, GradientConfig, SDP4BitConfig, TelemetryConfig, WeightConfig
from tests.ranks import on_ranks
from tests.toy import Run, assert_close, build

FEW = SDP4BitConfig(
    gradients=GradientConfig(inter_bits=3, min_numel=0),
    weights=WeightConfig(bits=2, group_size=128),
    telemetry=TelemetryConfig(interval=1),
    alerts=AlertConfig(),
)
MIXED = replace(
    FEW,
    gradients=replace(FEW.gradients, intra_bits=3, inter_bits=2),
    weights=replace(FEW.weights, bits=3, replica="full"),
)


@on_ranks(4)
def test_few_bits_train_the_table_and_the_measures_tell_them_and_nobody_is_alarmed() -> None:
    plain = Run(build(), None, ordered=True).train(2).finish()
    for config in (FEW, MIXED):
        run = Run(build(), config).train(2)
        stats, table = run.comm.stats(), run.comm.explain()
        assert_close(run.finish(), plain, loss=0.03, gradient=2.0)  # of 2 and 3 bits
        assert not run.comm.alerts()
        if config is FEW:
            assert "int2/128 clipped at 0.6 difference" in table and "inter int3/128" in table
            assert 0.3 < stats["gradient_error"] < 0.7  # 0.39 on bell-shaped values, which these are not
            assert 0.3 < stats["weight_error"] < 0.9
