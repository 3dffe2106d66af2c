"""`fxcomp explain`: predict a job's step on a cluster, and recommend compression or dense."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from fxcomp import status_line
from fxcomp.commands.job_options import add_job_options, asked_compress, chosen_cluster, job_files, names_links
from fxcomp.commands.outputs import check_outputs, check_page, save_plan
from fxcomp.cost.table import CostTable
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.errors import BadOption
from fxcomp.frontends.job import load_job
from fxcomp.frontends.what_if import WhatIf, imagining, what_if
from fxcomp.gc_paused import gc_paused
from fxcomp.plan.compress import Compress
from fxcomp.report.step_report import StepReport
from fxcomp.report.terminal import print_report

NAME = "explain"
HELP = "predict a job's step on a cluster, and whether to compress"
EXAMPLES = """\
  fxcomp explain train.py:job --inter 1gbit                     two hosts of one rank
  fxcomp explain train.py --cluster 8x4 --inter 25gbit          would it pay there?
  fxcomp explain train.py --cluster 8x4 --step-ms 120 --json    with your GPU's step, for a program
  fxcomp explain train.py --cluster 8x4 --device h100           estimated for GPUs that are not here
  fxcomp explain train.py --cluster my_cluster.toml             racks, uneven hosts, other links
  fxcomp explain train.py --pin 'embed.*=dense'                 leave some gradients alone
  fxcomp explain train.py --compress 'like(topk(0.01))'         the same error, in any way that is faster
  fxcomp explain train.py --compress aggressive --steps 3000    momenta, where the job is over sooner
  fxcomp explain train.py --accumulate 4                        gradients of four batches, sent once
  fxcomp explain train.py --costs costs.json --cluster 8x4      with measured costs, from here or elsewhere
  fxcomp explain train.py --html report.html                    drawn, for a browser; --trace for Perfetto
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser)
    parser.add_argument("--errors", metavar="FILE", help="errors of compressors on its gradients: step.error_table")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="time of a step there without communication")
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="a step sums up the gradients of N batches (default: 1)",
    )
    parser.add_argument("--device", metavar="NAME", help="estimate for such ranks: a100, h100, h200, l40s, ...")
    parser.add_argument("--costs", metavar="FILE", help="a table that fxcomp calibrate wrote, here or elsewhere")
    parser.add_argument("--save-plan", metavar="FILE", help="write the plan, for compile_step(compress=FILE)")
    parser.add_argument("--html", metavar="FILE", help="write the report as one page for a browser, with drawings")
    parser.add_argument("--trace", metavar="FILE", help="write the predicted steps for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print data instead of a report")


@gc_paused()
def run(arguments: argparse.Namespace) -> int:
    written = {"--save-plan": arguments.save_plan, "--html": arguments.html, "--trace": arguments.trace}
    check_outputs(written, (*job_files(arguments), arguments.costs, arguments.errors))
    if arguments.html:
        check_page("--html", arguments.html)
    costs = CostTable.read(arguments.costs) if arguments.costs else None
    cluster, assumed = chosen_cluster(arguments, costs)
    if costs is not None and names_links(arguments):
        costs = replace(costs, collectives={})
        assumed = (*assumed, "Collectives are priced by the named links, not by the table's measurements.")
    errors = ErrorTable.load(arguments.errors) if arguments.errors else ASSUMED
    _tell("loading the job")
    with imagining(arguments.device):
        job = load_job(arguments.job)
        question = WhatIf(
            compress=_by_errors(asked_compress(arguments, job), errors),
            errors=errors,
            step_ms=arguments.step_ms,
            device=arguments.device,
            costs=costs,
            accumulate=arguments.accumulate,
        )
        found = what_if(job, cluster, question, _tell)
    status_line.clear()
    if arguments.save_plan:
        save_plan(found.plan, arguments.save_plan)
    explanation = replace(found, notes=(*assumed, *found.notes))
    report = StepReport(explanation)
    if arguments.html:
        report.save_html(arguments.html)
    if arguments.trace:
        report.save_trace(arguments.trace)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print_report(explanation, sys.stdout)
    return 0


def _by_errors(compress: Compress, errors: ErrorTable) -> Compress:
    if not errors.is_measured:
        return compress
    if compress.plan is not None:
        raise BadOption("--errors has the errors of compressors, to choose by; --compress names a plan: keep one")
    return replace(compress, measured=True)


def _tell(what: str) -> None:
    status_line.show(f"{what} ...")
