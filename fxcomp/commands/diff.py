"""`fxcomp diff a.json b.json`: print the differences between two plans."""

from __future__ import annotations

import argparse
import json
import sys

from fxcomp import compat
from fxcomp.errors import BadPlan, FxcompError
from fxcomp.report.plan_diff import PlanFile, diff_plans, headline, sections_of
from fxcomp.report.terminal import print_sections

NAME = "diff"
HELP = "list the differences of two plans; exit with 1 if there are any"
EXAMPLES = """\
  fxcomp diff old_plan.json new_plan.json                       saved plans, or the output of explain --json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json", help="a saved plan (explain --save-plan), or explain --json's data")
    parser.add_argument("after", metavar="B.json", help="the other one")
    parser.add_argument("--all", action="store_true", help="name every gradient")
    parser.add_argument("--json", action="store_true", help="print data instead of words")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences. Return 0 if there are none, else 1."""
    diff = diff_plans(_read(arguments.before), _read(arguments.after))
    if arguments.json:
        print(json.dumps(diff.to_json(), indent=1))
    else:
        print_sections(headline(diff), sections_of(diff, all_names=arguments.all), sys.stdout)
    return 0 if diff.is_empty else 1


def _read(path: str) -> PlanFile:
    try:
        return PlanFile.from_json(compat.read_json(path))
    except OSError as error:
        raise BadPlan(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, FxcompError) as error:
        raise BadPlan(
            f"cannot read {path} as a plan: {error}\n"
            "  Write one with fxcomp explain JOB --save-plan FILE, or fxcomp explain JOB --json > FILE."
        ) from None
