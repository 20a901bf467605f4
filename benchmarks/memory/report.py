"""The table of what was counted beside what is predicted."""

from __future__ import annotations

from collections.abc import Mapping

HEAD = (
    "| | a layer keeps | most of two layers | predicted | 32 layers, predicted | on the host |",
    "| --- | ---: | ---: | ---: | ---: | ---: |",
)

TWO = ("peak_of_two_layers_bytes", "predicted_of_two_layers_bytes")


def table(case: Mapping[str, Mapping[str, float]]) -> str:
    """Return a line for each option, in units of one layer's input and in GiB."""
    lines = [*HEAD]
    for name, one in case.items():
        unit = one["layer_input_bytes"]
        cells = [
            *(f"{one[key] / unit:.3f} u" for key in ("kept_by_a_layer_bytes", *TWO)),
            f"{one['predicted_bytes'] / 2**30:.1f} GiB",
            f"{one['predicted_host_bytes'] / 2**30:.0f} GiB",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
