"""What `plan` prints of several layouts: buckets, switches, and every static layout's step."""

from __future__ import annotations

from dataclasses import replace

from tests.support.hardware import H100
from tests.support.shapes import hub
from tests.support.steps import step_of
from uspft.commands.plan_pages import STATIC_LINES, switching_lines
from uspft.switching.choose.choice import StaticTime, SwitchingChoice
from uspft.switching.choose.drawn_steps import DrawnSteps
from uspft.switching.choose.layout_set import LayoutSet
from uspft.switching.choose.priced import PricedLayout, Setting, priced_layouts

LLAMA, ROW = hub("meta-llama/Llama-3.1-8B"), 8192
SETTING = Setting(step_of(LLAMA, ROW, step_rows=8), H100, 4, 400e9)
DRAWN = DrawnSteps([500, 900, ROW], 32, ROW)
PARAMETERS = 8_030_261_248


def one(length: int, tensor: int, context: int) -> PricedLayout:
    every = priced_layouts(SETTING, length, DRAWN.typical(length), most=1)
    degrees = (tensor, context)
    return next(each for each in every if (each.layout.tensor, each.layout.context) == degrees)


def found(*buckets: PricedLayout, seconds: float, moves: bool = False) -> SwitchingChoice:
    mix = LayoutSet(SETTING, buckets, 1, moves)
    return SwitchingChoice(mix, seconds, (StaticTime(one(ROW, 1, 4), 2.0),))


def test_a_mix_by_lines() -> None:
    lines = switching_lines(found(one(1024, 1, 1), one(ROW, 1, 4), seconds=1.0), DRAWN)
    text = "\n".join(lines)
    short, long = (line.split() for line in lines[0].splitlines()[1:])
    assert short[:4] == ["1,024", "tokens", "data4", "1"] and long[3] == "4"
    packed = [len(DRAWN.rows(step, (1024, ROW))) for step in range(len(DRAWN.steps))]
    counts = float(short[4]) + float(long[4])
    assert abs(counts - sum(packed) / len(packed)) < 0.2
    assert "switches of sequence degrees: no weight moves" in lines
    assert "switching (chosen)" in text and text.count("(chosen)") == 1


def test_the_bytes_of_each_switch() -> None:
    in_place = switching_lines(found(one(1024, 1, 1), one(ROW, 4, 1), seconds=3.0), DRAWN)
    padded = 4 * (PARAMETERS - PARAMETERS / 4) / 2**30
    said = next(line for line in in_place if line.startswith("switches in place"))
    assert abs(float(said.split("up to ")[1].split()[0]) - padded) < 0.1 and "GiB" in said
    table = next(block for block in in_place if block.startswith("step of"))
    assert "(chosen)" in table.splitlines()[2] and "(chosen)" not in table.splitlines()[1]
    moved = found(one(1024, 1, 1), one(ROW, 4, 1), seconds=1.0, moves=True)
    said = next(line for line in switching_lines(moved, DRAWN) if "by moving" in line)
    whole = PARAMETERS * (2 + 4) * 3 / 4 / 2**30
    assert f"tensor 1: {whole:.1f}"[:12] in said and "tensor 4: 0" in said


def test_layouts_that_do_not_fit_are_said_so_and_many_are_counted() -> None:
    static = tuple([StaticTime(one(ROW, 1, 4), None)] * (STATIC_LINES + 3))
    none = replace(found(one(ROW, 1, 4), seconds=1.0), layouts=None, static=static)
    lines = switching_lines(none, DRAWN)
    assert "\n".join(lines).count("does not fit") == STATIC_LINES
    assert lines[-1] == "and 3 more static layouts" and "(chosen)" not in "\n".join(lines)
