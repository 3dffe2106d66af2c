"""`fxcomp dump`: print a job's graph after any pass, or the emitted step."""

from __future__ import annotations

import argparse
import sys

from fxcomp.commands.job_options import add_job_options, asked_compress, chosen_cluster
from fxcomp.frontends.job import load_job
from fxcomp.frontends.what_if import imagining, rewritten
from fxcomp.gc_paused import gc_paused
from fxcomp.graph.dump import dump
from fxcomp.graph.kernels import kernels, launches
from fxcomp.pipeline import pass_names
from fxcomp.report.terminal import encodable

NAME = "dump"
HELP = "print a job's graph, with assumed costs: the same on every machine"
EXAMPLES = """\
  fxcomp dump train.py --after bucket_gradients                 the graph after a pass
  fxcomp dump train.py --source                                 the code that would run
  fxcomp dump train.py --source --device h100                   on a GPU that is not here, and its kernel counts
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser)
    passes = ", ".join(pass_names())
    parser.add_argument("--after", metavar="PASS", help=f"the graph after this pass (default: the last): {passes}")
    parser.add_argument("--device", metavar="NAME", help="the step for such ranks: a100, h100, h200, l40s, ...")
    parser.add_argument("--source", action="store_true", help="print the emitted step instead of the graph")


@gc_paused()
def run(arguments: argparse.Namespace) -> int:
    cluster, _ = chosen_cluster(arguments)
    with imagining(arguments.device):
        job = load_job(arguments.job)
        program = rewritten(job, cluster, asked_compress(arguments, job), arguments.device)
    text = program.source if arguments.source else dump(program.graph_after(arguments.after))
    if arguments.device and not arguments.after:
        counts = (
            f"# {kind}: {number} kernels" for kind, number in launches(program.graph, kernels(program.graph)).items()
        )
        text = "\n".join([text, *counts])
    print(encodable(text, sys.stdout.encoding))
    return 0
