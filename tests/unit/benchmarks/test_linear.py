"""The benchmark of layers with a state: what its truth is, what it counts, and what it shows."""

from __future__ import annotations

import torch

from benchmarks.linear.counted import SIZES, TOKENS, counted, crossing, gathered_bytes
from benchmarks.linear.figures import errors, seconds, sent
from benchmarks.linear.hosts.figures import table, verdict
from benchmarks.linear.inputs import GATES, inputs, rule, written_out
from uspft.families import StateSizes
from uspft.sequence.states import Mixed

SMALL = StateSizes(2, 4, 8, 12)


def test_a_token_at_a_time_is_the_rule_of_transformers() -> None:
    for gate in GATES:
        x = inputs(150, SMALL, gate)
        out, _ = rule()(Mixed(*(one.float() for one in x)), None)
        want = written_out(x)
        assert float((out.double() - want).abs().max() / want.abs().max()) < 1e-5
    longer = written_out(x._replace(g=x.g - 1))
    assert float((longer - want).abs().max() / want.abs().max()) > 1e-2


def test_what_is_counted() -> None:
    found = counted()
    assert {one["model"] for one in found} < SIZES.keys() and len(found) == 2 * 4 * len(TOKENS)
    for one in found:
        assert one["heads"] < one["gather"]
        assert one["states"]["one span"] < one["states"]["two spans"]
        same = [
            two for two in found if (two["model"], two["ranks"]) == (one["model"], one["ranks"])
        ]
        assert len({two["states"]["two spans"] for two in same}) == 1, "by no token"
    token = (2 * 2 * 8 + 4 * 12) * 2 + 4 * 6
    assert gathered_bytes(SMALL, 100, 4) == 2 * 3 * 25 * token
    # By hand: states and how they change of 32 heads of 128 × 128 to all with later tokens and, of
    # gradients, with earlier ones, against the features of a token to and from all others.
    for ranks in (2, 4, 8, 16):
        states = 8 * 32 * 128**2 * max(2 * (ranks - 1), 4 * ranks - 6)
        token = 2 * (ranks - 1) / ranks**2 * ((8192 + 4096) * 2 + 32 * 6)
        assert abs(crossing("Qwen3.5-9B", ranks) * token / states - 1) < 0.02
    assert sent(found).count("\n") == 1 + len(TOKENS) * 4


def test_tables() -> None:
    one = {"gate": "A 1", "one process": [1e-6, 2e-7], "bfloat16": [3e-3, 4e-4]}
    assert errors([one]).splitlines()[2] == "| A 1 | 2.0e-07 (1.0e-06) | 4.0e-04 (3.0e-03) |"
    assert seconds([{"tokens": 4096, "rule": 1.234}]).splitlines()[2] == "| 4k | 1.23 |"
    cases = [
        {
            "tokens": tokens,
            "sent": {"heads": tokens, "states": 300},
            "seconds": {"heads": [1.0, tokens / 100, 9.0], "states": [1.0, 5.0, 6.0]},
        }
        for tokens in (200, 400, 800)
    ]
    assert verdict(cases) == (
        "States send less from 400 tokens on, and take less time from 800 tokens on."
    )
    assert table(cases).splitlines()[2].startswith("| 200 | 0.00 | 0.00 | 2.00 | 1.00 to 9.00 |")
    assert torch.is_grad_enabled()
