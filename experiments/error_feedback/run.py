"""Train with error feedback between nodes: what a message leaves out is added to the next one. One process.

    sdp4bit compare --strategies baseline --seeds 1,2,3 --simulated-ranks 4 --ranks-per-node 2 ... \\
        --out runs/feedback
    python -m experiments.error_feedback.run --seeds 1,2,3 --feedback none plain averaged --out runs/feedback \\
        --strategy tlq-hs --gradient-quantization-bits-inter 3 --simulated-ranks 4 --ranks-per-node 2 ...
    python -m benchmarks.curve runs/feedback --out runs/feedback

trains as `sdp4bit pretrain` does with these options, on simulated ranks of several nodes with several ranks
each. Every rank keeps, for each value that it sends to another node, an error e in fp32, and sends h = g + e
instead of the sum g over its node:

* `plain`: e is h - sent(h), all that the last message left out (Seide et al., Interspeech 2014);
* `averaged`: e becomes (1 - beta) e + beta (h - sent(h)), and 0 every `--reset` steps: the moving average of
  LoCo (Xie et al., arXiv 2407.04480), whose state in 8 bits is left out here;
* `none`: the library's own exchange.

Feedback is not in the library. Whether it should be is what this measures.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter, as_dither
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import FULL_PRECISION, MessageLayout, message_layout
from sdp4bit.quantization.random import RoundingKey
from sdp4bit_lab.cli import COMMANDS
from sdp4bit_lab.common.ranks import Ranks, join_ranks
from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.trainer import TrainingResult, pretrain
from sdp4bit_lab.simulated import collectives as simulated

Feedback = Literal["none", "plain", "averaged"]
FEEDBACKS: tuple[Feedback, ...] = ("none", "plain", "averaged")


def reduction_with_feedback(*, beta: float, reset: int | None) -> type[QuantizedReduceScatter]:
    """Return a reduction that adds to each message between nodes what earlier ones left out.

    Args:
        beta: weight of the last message's error in the average; 1 for plain feedback.
        reset: reductions from one to the next that forget the errors; None for never.
    """

    class WithFeedback(QuantizedReduceScatter):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.errors: dict[tuple[int, int], Tensor] = {}
            """By the section and the place of a slice's first value in it: [nodes, n], fp32."""
            self.reductions: dict[tuple[int, int], int] = {}

        def _requantize(
            self,
            received: Tensor,
            layout: MessageLayout,
            sent: Tensor,
            summed: MessageLayout,
            *,
            rounding: RoundingKey | None,
            dither: RoundingKey | None,
            place: tuple[int, int],
        ) -> None:
            # The transform also fills a row's padding with values that its receivers need.
            layout, summed = _with_padding(layout), _with_padding(summed)
            wanted = _sum(received, layout, dither=dither)
            done = self.reductions.get(place, 0)
            if reset is not None and done % reset == 0:
                self.errors.pop(place, None)
            self.reductions[place] = done + 1
            error = self.errors.setdefault(place, torch.zeros_like(wanted))
            wanted += error
            rows = wanted.unsqueeze(1)  # [nodes, one part, n]
            ops.hadamard_quantize(rows, out=sent, layout=summed, hadamard=None, rounding=rounding)
            left_out = wanted - self._restored(sent, summed, rounding)
            error.mul_(1 - beta).add_(left_out, alpha=beta)

        def _restored(self, sent: Tensor, layout: MessageLayout, rounding: RoundingKey | None) -> Tensor:
            """Return what the receivers make of these messages, [nodes, n]."""
            restored = sent.new_empty(len(sent), layout.numel, dtype=torch.float32)
            # The messages of all senders to a node, the others' zero: the dither depends on the sender.
            own, messages = self._topology.node, torch.zeros_like(sent)
            for node, row in enumerate(restored):
                messages[own] = sent[node]
                ops.dequantize_reduce_hadamard(
                    messages,
                    out=row,
                    layout=layout,
                    hadamard=None,
                    multiplier=1.0,
                    dither=as_dither(rounding, row=node),
                )
            return restored

    return WithFeedback


def _with_padding(layout: MessageLayout) -> MessageLayout:
    """Return the layout of the same bytes, in which padding counts as values."""
    return replace(layout, numel=layout.padded_numel)


def _sum(messages: Tensor, layout: MessageLayout, *, dither: RoundingKey | None) -> Tensor:
    """Return the sum over the messages, fp32 [parts, n]."""
    exact = message_layout(numel=layout.numel, bits=FULL_PRECISION, group_size=layout.group_size)
    sums = messages.new_empty(layout.parts, exact.nbytes)
    ops.dequantize_reduce_quantize(
        messages, received=layout, out=sums, sent=exact, rounding=None, dither=dither
    )
    return sums.view(torch.float32)[:, : layout.numel].clone()


def train(
    config: PretrainConfig, *, feedback: Feedback, beta: float, reset: int, ranks: Ranks
) -> TrainingResult:
    """Train a run with this feedback; its label is the strategy's name and the feedback's."""
    parallel = config.parallel
    require(
        parallel.simulated_ranks is not None
        and parallel.ranks_per_node is not None
        and 1 < parallel.ranks_per_node < parallel.simulated_ranks,
        "feedback is between nodes of several ranks, in one process: give --simulated-ranks 4 "
        "--ranks-per-node 2, or more",
    )
    require(config.quantization.gradients is not None, f"{config.strategy_name} quantizes no gradients")
    label = f"{config.strategy_name}, feedback {feedback}"
    if feedback == "none":
        return pretrain(config, ranks=ranks, label=label)
    averaged = feedback == "averaged"
    kind = reduction_with_feedback(beta=beta if averaged else 1.0, reset=reset if averaged else None)
    with mock.patch.object(simulated, "QuantizedReduceScatter", kind):
        return pretrain(config, ranks=ranks, label=label)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", required=True, help="numbers with commas between")
    parser.add_argument("--feedback", nargs="+", choices=FEEDBACKS, default=list(FEEDBACKS))
    parser.add_argument("--beta", type=float, default=0.2, help="weight of the last error in the average")
    parser.add_argument("--reset", type=int, default=1024, help="steps from one reset to the next")
    parser.add_argument("--out", type=Path, required=True)
    arguments, options = parser.parse_known_args()
    try:
        require(0 < arguments.beta <= 1, f"--beta {arguments.beta:g} must be above 0 and at most 1")
        require(arguments.reset >= 1, f"--reset {arguments.reset} must be at least 1")
        with join_ranks() as ranks:
            for seed in map(int, arguments.seeds.split(",")):
                for feedback in arguments.feedback:
                    folder = arguments.out / f"feedback-{feedback}-seed{seed}"
                    config = COMMANDS["pretrain"].parse([*options, "--seed", str(seed), "--out", str(folder)])
                    config = replace(config, logging=replace(config.logging, tensorboard=False))
                    train(
                        config,
                        feedback=feedback,
                        beta=arguments.beta,
                        reset=arguments.reset,
                        ranks=ranks,
                    )
        return 0
    except SettingError as error:
        print(f"experiments.error_feedback.run: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
