"""What `plan` says of several layouts in one step: buckets, what each switch moves, the step."""

from __future__ import annotations

from statistics import fmean

from uspft.commands.plan_pages import aligned
from uspft.layout import Layout
from uspft.metrics import as_size
from uspft.switching.choose.choice import SwitchingChoice
from uspft.switching.choose.drawn_steps import DrawnSteps
from uspft.switching.choose.layout_set import LayoutSet

STATIC_LINES = 12
"""The most static layouts that are listed; the others are counted."""
LEGEND = (
    "seconds of a row are those of a typical one, on all ranks of its group; memory is what a row "
    "takes of what the model's state leaves; static layouts have rows of the longest bucket, packed"
)


def switching_lines(found: SwitchingChoice, drawn: DrawnSteps) -> list[str]:
    """Return the lines for a recipe's strategies, or for those that `auto` weighed."""
    lines = []
    if found.mix:
        lines += [_buckets(found.mix, drawn), _switches(found.mix)]
    lines += [_steps(found), LEGEND]
    left = len(found.static) - STATIC_LINES
    return [*lines, f"and {left} more static layouts"] if left > 0 else lines


def _buckets(mix: LayoutSet, drawn: DrawnSteps) -> str:
    """Return a line for each bucket, those of shorter rows first."""
    lines = [["rows of", "layout", "ranks of a group", "rows a step", "seconds a row", "memory"]]
    steps = [drawn.rows(step, mix.bounds) for step in range(len(drawn.steps))]
    for number, (one, share) in enumerate(zip(mix.buckets, mix.shares, strict=True)):
        rows = fmean(sum(row.bucket == number for row in step) for step in steps)
        seconds = one.seconds[0] + one.beside
        lines.append(
            [
                f"{one.length:,} tokens",
                one.name,
                str(one.group_ranks),
                f"{rows:.3g}",
                f"{seconds:.3g}",
                f"{share:.0%}" if share <= 1 else "does not fit",
            ]
        )
    return aligned(lines)


def _switches(mix: LayoutSet) -> str:
    """Return what a rank receives for each switch of layouts."""
    if mix.moves:
        each = [
            f"{_held(layout)}: {as_size(int(moved))} in {seconds:.3g} s"
            for layout, (moved, seconds) in zip(mix.held_in_turn, mix.transfers, strict=True)
        ]
        return f"switches by moving weights and gradients, a rank receives: {', '.join(each)}"
    if padded := mix.padding_bytes:
        return (
            "switches in place: no weight moves; of the gradients' sum on a rank up to "
            f"{as_size(int(padded))} are padding"
        )
    return "switches of sequence degrees: no weight moves"


def _held(layout: Layout) -> str:
    stages = f", stages {layout.pipeline}" if layout.pipeline > 1 else ""
    return f"tensor {layout.tensor}{stages}"


def _steps(found: SwitchingChoice) -> str:
    """Return the predicted step of the mix and of static layouts, the fastest first."""
    lines = [["step of as many samples", "seconds"]]
    if found.mix:
        taken = " (chosen)" if found.switches else ""
        lines.append([f"switching{taken}", f"{found.mix_seconds:.3g}"])
    for number, one in enumerate(found.static[:STATIC_LINES]):
        taken = " (chosen)" if not number and not found.switches and one.seconds else ""
        seconds = "does not fit" if one.seconds is None else f"{one.seconds:.3g}"
        lines.append([f"static {one.priced.name}{taken}", seconds])
    return aligned(lines)
