"""The command line: what it prints, and how it fails."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.traces import check_trace

from fxcomp.__main__ import main
from fxcomp.cost.measured import MeasuredCollective
from fxcomp.cost.table import CostTable
from fxcomp.pipeline import pass_names
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.plan import Plan

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "mlp.py")


def test_explain_prints_the_report(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", f"{EXAMPLE}:job", "--cluster", "8x4", "--inter", "1gbit", "--intra", "300gbit"]) == 0
    text = capsys.readouterr().out
    for part in ("8 hosts x 4 ranks, 1gbit", "against dense", "Plan\n", "Timeline\n", "Break-even", "Sources of"):
        assert part in text
    assert "\x1b" not in text
    assert "Assumed" not in text


def test_what_the_user_does_not_say_is_named(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", EXAMPLE]) == 0
    assert "Assumed, because not given: --cluster 2x1, --inter 10gbit." in capsys.readouterr().out


def test_links_of_a_table_and_assumed_ones_are_told_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    kind = CollectiveKind.ALL_REDUCE
    measured = {(kind, "1x2"): MeasuredCollective.line(kind, 2, 30.0, 1.0, source="measured, 9 samples")}
    path = tmp_path / "costs.json"
    CostTable(collectives=measured).save(path)
    asked = ["explain", EXAMPLE, "--cluster", "8x4", "--costs", str(path)]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert text.startswith("8 hosts x 4 ranks, 10gbit between hosts (assumed), 8gbit inside (measured)")
    assert "Assumed, because not given: --inter 10gbit." in text
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["measured"] == ["intra"]


def test_reports_are_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def widest(columns: str) -> int:
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["explain", EXAMPLE, "--inter", "10mbit", "--step-ms", "5"]) == 0
        return max(map(len, capsys.readouterr().out.splitlines()))

    assert widest("70") <= 70
    assert 100 < widest("160") <= 160
    assert widest("wide") == widest("") == 100


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "colored"), [("1", False), ("", True)])
def test_no_color_leaves_no_escape_code(no_color: str, colored: bool, monkeypatch: pytest.MonkeyPatch):
    out, said = Terminal(), Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["explain", EXAMPLE, "--inter", "10mbit", "--step-ms", "5"]) == 0
    assert ("\x1b[" in out.getvalue()) is colored
    assert "choosing ..." in said.getvalue()
    assert "\x1b" not in said.getvalue()


def test_a_link_alone_means_two_hosts(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", EXAMPLE, "--inter", "10mbit"]) == 0
    assert capsys.readouterr().out.startswith("2 hosts x 1 rank, 10mbit between hosts")


def test_json_is_one_document_and_the_saved_plan_is_its_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "plan.json"
    assert main(["explain", EXAMPLE, "--inter", "10mbit", "--json", "--save-plan", str(path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "compress"
    assert Plan.load(path).digest == data["plan"]["digest"]

    assert main(["explain", EXAMPLE, "--inter", "10mbit", "--json", "--compress", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["digest"] == data["plan"]["digest"]


def test_one_compressor_everywhere_is_a_plan_too(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", EXAMPLE, "--compress", "int8", "--json"]) == 0
    strategies = [bucket["strategy"] for bucket in json.loads(capsys.readouterr().out)["plan"]["buckets"]]
    assert any("int8" in strategy for strategy in strategies)


def test_dump_prints_the_graph_after_a_pass(capsys: pytest.CaptureFixture[str]):
    assert main(["dump", EXAMPLE, "--after", "bucket_gradients", "--compress", "dense"]) == 0
    text = capsys.readouterr().out
    assert "pack_0" in text
    assert text.rstrip().splitlines()[-1].startswith("output(")


def test_dump_lists_the_passes_that_it_knows(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["dump", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert ", ".join(pass_names()) in told
    assert main(["dump", EXAMPLE, "--after", "magic"]) == 2
    assert f"the passes are {', '.join(pass_names())}" in " ".join(capsys.readouterr().err.split())


def test_dump_prints_the_emitted_step(capsys: pytest.CaptureFixture[str]):
    assert main(["dump", EXAMPLE, "--source"]) == 0
    compile(capsys.readouterr().out, "step", "exec")


def test_dump_shows_the_step_of_a_device_and_what_it_is_handed(capsys: pytest.CaptureFixture[str]):
    assert main(["dump", EXAMPLE, "--source", "--device", "h100", "--compress", "dense"]) == 0
    source = capsys.readouterr().out
    assert "aten._fused_sgd_.default(parameters, gradients, momentum_buffers" in source
    assert "# pack: 2 kernels" in source
    assert "# forward and backward: " in source
    assert main(["dump", EXAMPLE, "--device", "h10"]) != 0
    assert "did you mean 'h100'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["explain", "nowhere.py"], "there is no file 'nowhere.py'"),
        (["explain", EXAMPLE, "--cluster", "8"], "cannot read the cluster '8'"),
        (["explain", EXAMPLE, "--inter", "fast"], "cannot read the bandwidth 'fast'"),
        (["explain", EXAMPLE, "--compress", "brave"], "The modes are lossless, balanced, aggressive, lossy"),
        (["explain", EXAMPLE, "--step-ms", "-1"], "step takes without a network, 1e-06 to 1e+09; it is -1"),
        (["explain", EXAMPLE, "--step-ms", "0"], "it is 0"),
        (["explain", EXAMPLE, "--step-ms", "inf"], "it is inf"),
        (["explain", EXAMPLE, "--step-ms", "nan"], "it is nan"),
        (["explain", EXAMPLE, "--step-ms", "1e300"], "it is 1e+300"),
        (["explain", EXAMPLE, "--cluster", "1000000000x1"], "may have 1,048,576 ranks; this one would have 1000000000"),
        (["explain", EXAMPLE, "--cluster", "2000x2000"], "this one would have 4000000"),
        (["explain", EXAMPLE, "--cluster", "1000000x1+1000000"], "may have 1,048,576 ranks"),
        (["explain", EXAMPLE, "--cluster", f"{'9' * 5000}x1"], "this one would have 10^30 or more"),
        (["explain", EXAMPLE, "--cluster", "0x4"], "needs at least 1 host and 1 rank a host, not 0x4"),
        (["explain", EXAMPLE, "--cluster", "8x"], "cannot read the cluster '8x'"),
        (["explain", EXAMPLE, "--cluster", ""], "--cluster is empty: give it a value, or leave it out"),
        (["explain", EXAMPLE, "--save-plan", ""], "--save-plan is empty"),
        (["explain", EXAMPLE, "--cluster", f"2x1, placed 0 {'9' * 5000}"], "does not put 1 ranks on each of 2 hosts"),
        (["explain", EXAMPLE, "--inter", "0gbit"], "cannot read the bandwidth '0gbit'"),
        (["explain", EXAMPLE, "--inter", "nan"], "cannot read the bandwidth 'nan'"),
        (["explain", EXAMPLE, "--inter", "inf"], "cannot read the bandwidth 'inf'"),
        (["explain", EXAMPLE, "--inter", "1e400gbit"], "cannot read the bandwidth '1e400gbit'"),
        (["explain", EXAMPLE, "--inter", "1e100gbit"], "a link's gb_per_s must be 1e-18 to 1e+18, not 1.25e+99"),
        (["explain", EXAMPLE, "--inter", f"25gbit@{'9' * 400}us"], "a link's alpha_us must be 0 to 1e+18, not inf"),
        (["explain", EXAMPLE, "--inter", f"{'9' * 5000}x25gbit"], "a link's count must be 1 to 1,048,576, not 10^30"),
        (["explain", EXAMPLE, "--inter", "0x25gbit"], "a link's count must be 1 to 1,048,576, not 0"),
        (["explain", EXAMPLE, "--rack", "0"], "a rack needs at least 1 host, not 0"),
        (["explain", EXAMPLE, "--rack", "9" * 400], "a rack may have 1,048,576 hosts, not 10^30 or more"),
        (["explain", EXAMPLE, "--rack", "1", "--oversubscription", "nan"], "cannot read the oversubscription 'nan'"),
        (["explain", EXAMPLE, "--device", "H-100"], "there is no device 'H-100'; did you mean 'h100'"),
        (["demo", "--steps", "0"], "--steps is how many steps each takes, 1 to 1,000,000; it is 0"),
        (["demo", "--inter", "nan"], "cannot read the bandwidth 'nan'"),
        (["calibrate", "--threads", "1025"], "--threads are numbers of threads, 1 to 1,024"),
        (["explain", EXAMPLE, "--device", "h10"], "there is no device 'h10'; did you mean 'h100'"),
        (["explain", EXAMPLE, "--compress", "none.json"], "cannot read the plan none.json"),
        (["explain", EXAMPLE, "--compress", "gzip"], "'gzip' is neither"),
        (["explain", EXAMPLE, "--save-plan", "/nowhere/plan.json"], "cannot save the plan to /nowhere/plan.json"),
        (["dump", EXAMPLE, "--after", "magic"], "there is no pass 'magic'"),
    ],
)
def test_a_mistake_is_told_in_words_with_status_2(words: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fxcomp: ")
    assert text in captured.err
    assert captured.out == ""


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("fxcomp.commands.explain.run", interrupted)
    assert main(["explain", EXAMPLE]) == 130
    assert capsys.readouterr() == ("", "")


def test_help_and_version_end_well(capsys: pytest.CaptureFixture[str]):
    for words in (["--help"], ["--version"], ["explain", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
    assert "fxcomp explain train.py" in capsys.readouterr().out


def test_demo_gets_its_options(monkeypatch: pytest.MonkeyPatch):
    heard: dict[str, object] = {}
    monkeypatch.setattr("fxcomp.commands.demo.run.run_demo", lambda **options: heard.update(options) or 0)
    assert main(["demo", "--steps", "4", "--json"]) == 0
    assert heard == {"inter": "300mbit", "steps": 4, "as_json": True}
    assert main(["demo", "--inter", "loopback"]) == 0
    assert heard == {"inter": "loopback", "steps": None, "as_json": False}


@pytest.mark.slow
def test_a_pipe_that_closes_early_and_a_terminal_without_unicode_are_no_error():
    shown = f"{sys.executable} -m fxcomp explain {EXAMPLE} --inter 10mbit --step-ms 5"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        ["bash", "-c", f"{shown} | head -n 3"], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[2].startswith("Compress")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_explain_writes_a_page_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page, trace = tmp_path / "report.html", tmp_path / "out.json"
    arguments = ["explain", EXAMPLE, "--cluster", "2x1", "--inter", "1gbit", "--device", "h100"]
    assert main([*arguments, "--html", str(page), "--trace", str(trace)]) == 0
    assert capsys.readouterr().out.splitlines()[2] in page.read_text()
    check_trace(json.loads(trace.read_text()))
    assert main([*arguments, "--html", str(page / "below.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_bisect_overwrites_nothing_that_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job, cluster, plan, checkpoint = (tmp_path / name for name in ("job.py", "cluster.toml", "plan.json", "model.pt"))
    arguments = ["bisect", f"{job}:make", "--cluster", str(cluster), "--compress", str(plan)]
    for path in (job, cluster, plan, checkpoint):
        path.write_text("as it was")
        assert main([*arguments, "--checkpoint", str(checkpoint), "--save-plan", str(path)]) == 2
        assert f"--save-plan {path} would overwrite {path}, which is read" in capsys.readouterr().err
        assert path.read_text() == "as it was"


@pytest.mark.parametrize("option", ["--html", "--trace", "--save-plan"])
def test_explain_overwrites_nothing_that_it_reads(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job, cluster, plan, costs, errors = (
        tmp_path / name for name in ("job.py", "cluster.toml", "plan.json", "costs.json", "errors.json")
    )
    for path in (job, cluster, plan, costs, errors):
        path.write_text("<!doctype html>")  # so that it may be a page's place
    arguments = ["explain", f"{job}:make", "--cluster", str(cluster), "--compress", str(plan)]
    arguments += ["--costs", str(costs), "--errors", str(errors)]
    for path in (job, cluster, plan, costs, errors):
        link = tmp_path / f"link to {path.name}"
        link.symlink_to(path)
        for output in (path, link):
            assert main([*arguments, option, str(output)]) == 2
            assert f"{option} {output} would overwrite {path}, which is read" in capsys.readouterr().err
        assert path.read_text() == "<!doctype html>"


def test_explain_writes_no_file_twice_and_no_page_over_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = str(tmp_path / "out")
    assert main(["explain", EXAMPLE, "--html", out, "--trace", out]) == 2
    assert f"--trace {out} would overwrite {out}, which --html writes" in capsys.readouterr().err
    Path(out).write_text("notes")
    assert main(["explain", EXAMPLE, "--html", out]) == 2
    assert f"--html {out} would overwrite a file that is no page" in capsys.readouterr().err
    assert Path(out).read_text() == "notes"
