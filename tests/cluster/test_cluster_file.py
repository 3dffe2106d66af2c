"""Clusters from TOML and from the command line, named links, and what is said about mistakes."""

import argparse
import re
from pathlib import Path

import pytest

from fxcomp.cluster.cluster import Cluster, Tier
from fxcomp.cluster.cluster_file import load_cluster, parse_ratio
from fxcomp.cluster.link import LINK_PRESETS, Link
from fxcomp.commands.job_options import add_job_options, chosen_cluster
from fxcomp.errors import BadOption

ROOT = Path(__file__).parents[2]
GOOD = 'cluster = "2x2"\nintra = "nvlink4"\ninter = "25gbit"\n'
LINKS = 'intra = "nvlink4"\ninter = "25gbit"\n'


def read(folder: Path, text: str) -> Cluster:
    path = folder / "mine.toml"
    path.write_text(text)
    return load_cluster(path)


# Named links


def test_every_named_link_can_be_read():
    for name, (text, source) in LINK_PRESETS.items():
        assert Link.parse(name) == Link.parse(text)
        assert len(source) > 10
    assert Link.parse("NVLink4") == Link(3.4, 450.0)
    assert Link.parse("8xinfiniband-ndr@5us") == Link(5.0, 50.0, count=8)
    assert Link.parse("pcie4 shared") == Link(5.7, 31.51, is_shared=True)


def test_a_link_that_has_no_such_name_lists_those_there_are():
    with pytest.raises(
        BadOption, match=r"(?s)'nvlnk4': write it like 300mbit.* did you mean 'nvlink4'\?.*pcie5.*wan\."
    ):
        Link.parse("nvlnk4")


# Files


def test_the_example_is_read():
    cluster = load_cluster(ROOT / "examples" / "cluster.toml")
    inter = Link(12.0, 3.125, count=2)
    assert cluster == Cluster(8, 4, intra=Link.parse("nvlink4"), inter=inter).with_racks(4, oversubscription=4)
    assert cluster.above[0].link == Link(12.0, 6.25)


def test_the_examples_of_the_docs_are_read(tmp_path: Path):
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "costs.md").read_text(), re.DOTALL)
    assert [read(tmp_path, block).shape for block in blocks] == ["2x4x4", "(3+2)+(1x4)"]


def test_a_file_says_all_that_a_cluster_can_be(tmp_path: Path):
    even = Cluster(2, 2, intra=Link.parse("nvlink4"), inter=Link.parse("25gbit"))
    assert read(tmp_path, GOOD) == even
    assert read(tmp_path, f"placement = [0, 1, 1]\n{LINKS}") == Cluster.placed(
        (0, 1, 1), intra=even.intra, inter=even.inter
    )
    linked = read(tmp_path, f'{GOOD}[rack]\nhosts = 1\nlink = "10gbit@40us"\n')
    assert linked.above == (Tier("rack", Link(40.0, 1.25), (0, 1)),)
    assert read(tmp_path, f"{GOOD}[rack]\nhosts = 1\noversubscription = 2\n").above[0].link.gb_per_s == 3.125 / 2
    rack = '[[tier]]\nname = "rack"\nunits = [0, 1]\nlink = "10gbit"\n'
    site = '[[tier]]\nname = "site"\nunits = [0, 0]\nlink = "wan"\n'
    assert [tier.name for tier in read(tmp_path, GOOD + rack + site).above] == ["rack", "site"]


def test_links_that_are_named_outside_win_over_the_file(tmp_path: Path):
    (tmp_path / "mine.toml").write_text('cluster = "2x1"\nintra = "nvlink4"\n')
    assert load_cluster(tmp_path / "mine.toml", inter=Link(1.0, 2.0)).inter == Link(1.0, 2.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cluster = ", "it is not TOML: "),
        (LINKS, "write either cluster = .* or placement"),
        (f"{GOOD}placement = [0]", "write either cluster = .* or placement"),
        (f"{GOOD}intre = 1", r"there is no intre; did you mean 'intra'\? It may have cluster, placement"),
        ('cluster = "2x2"\nintra = "nvlink4"', 'inter is missing: add a link, like inter = "25gbit@8us"'),
        (f'cluster = "2y2"\n{LINKS}', "cluster: cannot read the cluster '2y2'"),
        (f"cluster = 2\n{LINKS}", "cluster must be a text, not 2"),
        (f"placement = 4\n{LINKS}", "placement must be a list, not 4"),
        (f'placement = [0, "a"]\n{LINKS}', r"placement\[1\] must be a whole number, not 'a'"),
        (f"placement = [0, 2]\n{LINKS}", "placement: the placement"),
        (f"placement = []\n{LINKS}", "placement: a cluster needs at least 1 rank"),
        ('cluster = "2x2"\nintra = "nvlink9"\ninter = "25gbit"', "intra: cannot read the bandwidth 'nvlink9'"),
        (f"{GOOD}rack = 4", "rack must be a table, not 4"),
        (f"{GOOD}[rack]\n", "rack.hosts is missing: how many hosts a rack has, like hosts = 4"),
        (f"{GOOD}[rack]\nhosts = true", "rack.hosts must be a whole number, not True"),
        (f"{GOOD}[rack]\nhosts = 0", "rack: a rack needs at least 1 host, not 0"),
        (f"{GOOD}[rack]\nhost = 4", r"there is no rack.host; did you mean 'hosts'\?"),
        (
            f'{GOOD}[rack]\nhosts = 1\noversubscription = "much"',
            "rack.oversubscription: cannot read .* write it like 4:1",
        ),
        (
            f'{GOOD}[rack]\nhosts = 1\nlink = "1gbit"\noversubscription = 2',
            "rack.link and rack.oversubscription both set the rack links",
        ),
        (
            f'{GOOD}[rack]\nhosts = 1\n[[tier]]\nname = "a"',
            r"\[rack\] and \[\[tier\]\] describe the same racks: keep one",
        ),
        (f'{GOOD}[[tier]]\nname = "a"\nlink = "1gbit"', r"tier\[0\].units is missing: a tier has name, link and units"),
        (
            f'{GOOD}[[tier]]\nname = "a"\nlink = "1gbit"\nunits = [0]',
            "tier: the as .* must give the a of each of the 2 units below",
        ),
    ],
)
def test_a_mistake_in_a_file_is_told_with_the_file_and_the_key(tmp_path: Path, text: str, says: str):
    with pytest.raises(
        BadOption, match=f"mine.toml: (it is not TOML: )?{says}" if "TOML" not in says else says
    ) as error:
        read(tmp_path, text)
    assert "mine.toml" in str(error.value)


def test_a_file_that_is_not_there_is_told():
    with pytest.raises(BadOption, match=r"cannot read the cluster nowhere.toml: No such file"):
        load_cluster("nowhere.toml")


@pytest.mark.parametrize(("text", "ratio"), [("4:1", 4.0), ("3:2", 1.5), ("2", 2.0)])
def test_an_oversubscription_is_a_ratio(text: str, ratio: float):
    assert parse_ratio(text) == ratio


@pytest.mark.parametrize("text", ["", "4:0", "0:1", "-1", "nan", "4:1:2", "much"])
def test_what_is_no_ratio_is_refused(text: str):
    with pytest.raises(BadOption, match=r"cannot read the oversubscription .*: write it like 4:1"):
        parse_ratio(text)


# The command line


def asked(*words: str) -> tuple[Cluster, tuple[str, ...]]:
    parser = argparse.ArgumentParser()
    add_job_options(parser)
    return chosen_cluster(parser.parse_args(["job.py", *words]))


def test_the_command_line_says_all_that_a_cluster_can_be():
    cluster, assumed = asked("--cluster", "8x4", "--inter", "ethernet25", "--intra", "nvlink4", "--rack", "4")
    assert str(cluster) == "2x4x4, rack 100gbit@25us, inter 25gbit@25us, intra 3600gbit@3.4us"
    assert assumed == ()
    cluster, _ = asked("--cluster", "8x4", "--rack", "4", "--oversubscription", "4:1")
    assert cluster.above[0].link.gb_per_s == cluster.inter.gb_per_s
    assert asked("--cluster", "3+2")[0].shape == "3+2"
    cluster, assumed = asked("--cluster", "2x2, inter 1gbit@9us")
    assert cluster.inter == Link(9.0, 0.125)
    assert assumed == ("Assumed, because not given: --intra 100gbit.",)
    example = str(ROOT / "examples" / "cluster.toml")
    assert asked("--cluster", example) == (load_cluster(example), ())
    assert asked("--cluster", example, "--inter", "1gbit")[0].inter == Link(25.0, 0.125)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--cluster", "2x2, inter 1gbit", "--inter", "2gbit"), "sets inter, and so does --inter: keep one"),
        (("--oversubscription", "4:1"), "--oversubscription is about racks: give the hosts of each with --rack"),
        (("--cluster", "2x2x2", "--rack", "2"), r"--rack: the cluster has racks already \(2x2x2\); leave it out"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words: tuple[str, ...], says: str):
    with pytest.raises(BadOption, match=says):
        asked(*words)


@pytest.mark.parametrize("content", ["cluster = " + "[" * 100_000, "placement = [" + "9" * 5000 + "]"])
def test_a_file_that_no_reader_can_stand_is_refused(content: str, tmp_path: Path):
    path = tmp_path / "cluster.toml"
    path.write_text(content)
    with pytest.raises(BadOption, match=r"cannot read the cluster .*it is not TOML"):
        load_cluster(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('cluster = "2x1, inter 1gbit"\nintra = "10gbit"\ninter = "25gbit"', "write links as intra and inter"),
        ('cluster = "2x4x2"\nintra = "10gbit"\ninter = "25gbit"\n[rack]\nhosts = 2', r"leave \[rack\]"),
    ],
)
def test_what_a_file_says_twice_is_refused(text: str, says: str, tmp_path: Path):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(BadOption, match=says):
        load_cluster(path)
