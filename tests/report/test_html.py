"""The page of a report: it has every number of the text, asks nobody for anything, and draws to scale."""

import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.explained import CASES, COSTS, by_hand, cluster, explanation, profiled
from jinja2 import UndefinedError

from fxcomp.compressors import parse_compressor
from fxcomp.cost.devices import preset_named
from fxcomp.cost.measured import MeasuredCollective
from fxcomp.cost.timeline import Timeline
from fxcomp.errors import BadOption
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.plan import Plan
from fxcomp.report.html.page import FIGURES, to_html
from fxcomp.report.html.render import drawn
from fxcomp.report.step_report import StepReport
from fxcomp.report.terminal import to_text
from fxcomp.report.tracks import Grounds, facts_of, tracks_of

VOID = {"meta", "link", "br", "img", "input"}
WIDEST = 4000  # columns in which no cell is folded
DRAWN = re.compile(r"[█▓░▒·]")


class Reader(HTMLParser):
    """Checks that tags close in order, and keeps the text, ids and links."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, each, value in self.attributes if each == name]


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(3)
def test_every_word_and_number_of_the_text_is_in_the_page(case: str):
    explained = CASES[case]()
    shown = " ".join(" ".join(read(to_html(explained)).words).split())
    lines = [line for line in to_text(explained, width=WIDEST).splitlines() if not DRAWN.search(line)]
    cells = [cell.strip() for line in lines for cell in re.split(r" {2,}", line) if cell.strip()]
    axes = re.compile(r"0|[\d.]+ ms|\w+(, enlarged)?, [\d.]+ ms")  # of the drawing in characters
    missing = [cell for cell in cells if " ".join(cell.split()) not in shown and not axes.fullmatch(cell)]
    assert missing == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(3)
def test_a_page_asks_nobody_for_anything(case: str):
    page = to_html(CASES[case]())
    reader = read(page)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert {value for name in ("src", "srcset", "data") for value in reader.values(name)} == set()
    ids, links = reader.values("id"), reader.values("href")
    assert len(ids) == len(set(ids))
    assert {link for link in links if link != "data:,"} <= {f"#{name}" for name in ids}
    assert "default-src 'none'" in " ".join(reader.values("content"))


def test_what_a_parameter_is_called_is_no_markup():
    explained = explanation(cluster("1gbit"))
    named = [replace(each, names=tuple(f"<script>{name}</script>&" for name in each.names))
             for each in explained.plan.buckets]  # fmt: skip
    workload = explained.workload
    gradients = tuple(replace(each, name=f"<script>{each.name}</script>&") for each in workload.gradients)
    other = replace(explained, plan=Plan(tuple(named)), workload=replace(workload, gradients=gradients))
    page = to_html(replace(other, choice=None, notes=("<script>alert(1)</script>",)))
    assert page.count("<script>") == 1, "the script of the page itself"
    assert html.escape("<script>head.weight</script>&") in page


def test_a_fact_that_a_template_does_not_get_is_an_error():
    with pytest.raises(UndefinedError, match="parameter 'caption' was not provided"):
        drawn("figure", "a drawing")


def test_a_task_is_as_wide_as_it_takes_long():
    """Both tracks are drawn on the scale of the longer one."""
    explained = profiled(replace(by_hand(), choice=None), slower=2.0)
    page = to_html(explained)
    widths = {
        match[2]: float(match[1]) for match in re.finditer(r'width="([\d.]+)%" height="20"><title>([^\n]+)\n', page)
    }
    spans = {span.task.name: span for span in explained.timeline.spans}
    longest = max(track.timeline.step_time_us for track in tracks_of(explained))
    assert widths
    for name, width in widths.items():  # of one name the last that is drawn stays: the measured one
        assert width == pytest.approx(100 * 2 * (spans[name].end_us - spans[name].start_us) / longest, abs=1e-3)


def test_every_task_names_the_grounds_of_its_price():
    explained = profiled(by_hand())
    dense, chosen, measured = tracks_of(explained)
    assert [track.name for track in (dense, chosen, measured)] == ["dense", "chosen", "measured, step 7"]
    facts = facts_of(explained, chosen)
    assert facts["compress 0"].source == "measured"
    assert facts["compress 0"].of == "int8: body[1].weight and 1 more"
    assert (facts["all_gather 0"].grounds, facts["all_gather 0"].source) == (
        Grounds.FORMULA,
        "the cluster's link, 1gbit@25us",
    )
    assert facts["reduce_scatter 2"].source.startswith("the cluster's link, ")
    assert facts["region 0"].grounds is Grounds.ASSUMED
    assert {each.grounds for each in facts_of(explained, measured).values()} == {Grounds.MEASURED}
    listed = to_html(explained).partition("Every task, with its price")[2]
    assert all(f'<td class="text">{span.task.name}</td>' in listed for span in chosen.timeline.spans)


def test_a_link_that_nobody_measured_is_assumed_beside_one_that_was():
    """Collectives inside a host were measured, those between hosts were not."""
    kind = CollectiveKind.REDUCE_SCATTER
    inside = {(kind, "1x2"): MeasuredCollective.line(kind, 2, 10.0, 5.0)}
    explained = replace(by_hand(), costs=replace(COSTS, collectives=inside))
    facts = facts_of(explained, tracks_of(explained)[1])
    assert facts["reduce_scatter 2"].grounds is Grounds.MEASURED
    assert facts["all_gather 0"].source == "the cluster's link, 1gbit@25us, assumed"
    assert facts["all_gather 0"].grounds is Grounds.ASSUMED


def test_times_of_a_device_that_is_not_here_are_estimated():
    costs = preset_named("a100").costs((parse_compressor("int8"),))
    explained = replace(by_hand(), costs=costs)
    facts = facts_of(explained, tracks_of(explained)[1])
    assert {facts[name].grounds for name in ("region 0", "pack 0", "compress 0")} == {Grounds.ESTIMATED}
    assert facts["compress 0"].source.startswith("estimated: ")


def test_every_figure_has_a_section():
    pages = [read(to_html(make())) for make in CASES.values()]
    titles = {" ".join(page.words) for page in pages}
    for title in FIGURES:
        assert any(title in words for words in titles), f"no section is called {title!r} any more"


def test_a_page_of_thousands_of_tasks_stays_below_a_megabyte():
    explained = by_hand()
    spans = explained.timeline.spans
    many = tuple(
        replace(span, task=replace(span.task, name=f"{span.task.name}{number:03}", after=()))
        for number in range(150)
        for span in spans
    )
    assert len(many) >= 2400
    assert len(to_html(replace(explained, timeline=Timeline(many), choice=None)).encode()) < 1_000_000


def test_a_report_is_saved_and_shown_in_a_frame_of_its_own(tmp_path: Path):
    report = StepReport(by_hand())
    report.save_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == to_html(report.explanation)
    assert str(report) == to_text(report.explanation)
    assert html.unescape(report._repr_html_().partition('srcdoc="')[2].rpartition('" style')[0]) == to_html(by_hand())
    with pytest.raises(BadOption, match="cannot write"):
        report.save_html(tmp_path / "report.html" / "below.html")
