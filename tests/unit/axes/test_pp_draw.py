"""Timelines as text and as pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from fivefold.axes.pp.build import SCHEDULES, build_schedule
from fivefold.axes.pp.draw import draw, legend
from fivefold.axes.pp.simulate import Costs, simulate
from fivefold.axes.pp.svg import svg
from fivefold.axes.pp.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def test_the_text_shows_every_action_at_its_time() -> None:
    drawn = draw(simulate(build_schedule("1f1b", 2, 3)), 80).plain
    assert drawn.splitlines() == [
        "rank 0 |F0 F1 .  .  B0=== F2 B1=== .  B2=== ",
        "rank 1 |.  F0 B0=== F1 B1=== F2 B2=== .  .  ",
    ]


def test_stages_of_a_rank_have_letters_and_long_times_more_lines() -> None:
    timeline = simulate(build_schedule("zbv", 2, 3))
    lines = draw(timeline, 50).plain.splitlines()
    assert max(map(len, lines)) <= 50
    rows = ["".join(line[8:] for line in lines if line.startswith(f"rank {r}")) for r in (0, 1)]
    for row, rank in zip(rows, (0, 1), strict=True):
        shown = row.replace(".", " ").split()
        letters = {timeline.schedule.held(rank)[0]: "a", timeline.schedule.held(rank)[1]: "b"}
        assert shown == [
            f"{a.kind}{a.microbatch}{letters[a.stage]}" for a in timeline.schedule.orders[rank]
        ]


def test_messages_show_while_a_rank_waits_for_them() -> None:
    timeline = simulate(build_schedule("gpipe", 2, 1), Costs(send=1.0))
    assert draw(timeline, 80).plain.splitlines() == [
        "rank 0 |F0 .  .  .  .  ~  B0=== ",
        "rank 1 |.  ~  F0 B0=== .  .  .  ",
    ]
    assert "~ idle, a message is on its way" in legend(timeline)
    picture = ET.fromstring(svg(timeline, "t"))
    assert len(picture.findall(f"{SVG}line")) == 2


def test_measured_times_of_any_length_are_drawn() -> None:
    schedule = build_schedule("gpipe", 1, 1)
    forward, backward = schedule.orders[0]
    spans = (Span(0, forward, 0.0, 0.0013), Span(0, backward, 0.0021, 0.0061))
    timeline = Timeline(schedule, spans)
    assert draw(timeline, 80).plain.startswith("rank 0 |F0 . ")
    assert len(draw(timeline, 80, unit=0.0001).plain.splitlines()) == 5
    ET.fromstring(svg(timeline, "measured"))


def test_pictures_have_a_box_for_every_action() -> None:
    for name in SCHEDULES:
        schedule = build_schedule(name, 4, 8)
        timeline = simulate(schedule)
        picture = ET.fromstring(svg(timeline, f"<{name}>"))
        tips = [tip.text for tip in picture.iter(f"{SVG}title")]
        assert len(tips) == sum(map(len, schedule.orders))
        assert tips[0] == "forward of micro-batch 0 on stage 0, 0 to 1"
        assert f"<{name}>" in [text.text for text in picture.iter(f"{SVG}text")]
        assert f"rank {schedule.ranks - 1}" in [text.text for text in picture.iter(f"{SVG}text")]
