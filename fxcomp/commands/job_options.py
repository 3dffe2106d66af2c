"""Options of the commands that take a job and a cluster."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.cluster_file import INTRA_ALPHA_US, load_cluster, parse_ratio
from fxcomp.cluster.link import Link
from fxcomp.cost.table import CostTable, link_of
from fxcomp.errors import BadOption
from fxcomp.frontends.job import Job, file_and_function
from fxcomp.plan.compress import Compress
from fxcomp.plan.given import is_path
from fxcomp.plan.pins import parse_pins

CLUSTER, INTER, INTRA = "2x1", "10gbit", "100gbit"


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add options for job, cluster, plan and job length."""
    add_plan_options(parser)
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        dest="job_steps",
        help="the number of steps of the whole job, which aggressive compares",
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="FILE.py[:job]", help="a file with a function that returns a fxcomp.Job")
    parser.add_argument(
        "--cluster", metavar="HxR", help=f"hosts x ranks per host, like 8x4 or 4+4+2, or a .toml (default: {CLUSTER})"
    )
    parser.add_argument("--inter", metavar="LINK", help=f"between hosts: 300mbit, 25gbit@8us (default: {INTER})")
    parser.add_argument("--intra", metavar="LINK", help=f"inside a host: nvlink4, pcie4, 12GB/s (default: {INTRA})")
    parser.add_argument("--rack", type=int, metavar="HOSTS", help="how many hosts each rack has (default: no racks)")
    parser.add_argument("--oversubscription", metavar="A:B", help="bandwidth of a rack's hosts : its uplink (1:1)")
    parser.add_argument(
        "--compress",
        metavar="HOW",
        help="a mode (lossless, balanced, aggressive, lossy), how much may be lost (0.05, 'like(topk(0.01))'), one"
        " setting for all (dense, bf16, int8), a strategy or a plan.json (default: the job's own, which is"
        " balanced)",
    )
    parser.add_argument(
        "--at",
        metavar="POINT",
        help="where the mean stands: gradient, momentum (of a plan), or auto: the mode decides (default: auto)",
    )
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="PATTERN=STRATEGY",
        help="pin parameters by name, like '*.bias=dense'; may be repeated, the last match decides",
    )


def asked_compress(arguments: argparse.Namespace, job: Job) -> Compress:
    """Return the compression options, by default the job's."""
    compress = Compress.of(job.compress) if arguments.compress is None else Compress.parse(arguments.compress)
    changes: dict[str, Any] = {"pins": parse_pins(arguments.pin), "at": arguments.at, "steps": arguments.job_steps}
    given = {name: value for name, value in changes.items() if value not in (None, {})}
    return replace(compress, **given) if given else compress


def job_files(arguments: argparse.Namespace) -> list[str]:
    job, _ = file_and_function(arguments.job)
    cluster, compress = arguments.cluster or "", arguments.compress or ""
    return [job, *([cluster] if cluster.endswith(".toml") else []), *([compress] if is_path(compress) else [])]


def names_links(arguments: argparse.Namespace) -> bool:
    cluster = arguments.cluster or ""
    return bool(arguments.inter or arguments.intra or cluster.endswith(".toml") or "," in cluster)


def chosen_cluster(arguments: argparse.Namespace, costs: CostTable | None = None) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster, and at most one note on assumed options. Links measured in `costs` replace default links."""
    text = arguments.cluster or CLUSTER
    inter = Link.parse(arguments.inter) if arguments.inter else None
    intra = Link.parse(arguments.intra, alpha_us=INTRA_ALPHA_US) if arguments.intra else None
    if text.endswith(".toml"):
        return _in_racks(load_cluster(text, intra=intra, inter=inter), arguments), ()
    assumed = [] if arguments.cluster else [f"--cluster {CLUSTER}"]
    named = {clause.split()[0] for clause in text.split(",")[1:] if clause.strip()}
    for name, link in (("inter", inter), ("intra", intra)):
        if link is not None and name in named:
            raise BadOption(f"--cluster {text!r} sets {name}, and so does --{name}: keep one")
    default = {"intra": Link.parse(INTRA, alpha_us=INTRA_ALPHA_US), "inter": Link.parse(INTER)}
    for name in default:
        measured = costs and link_of(costs, between_hosts=name == "inter")
        if measured is not None:
            default[name] = measured
            named.add(name)
    cluster = Cluster.parse(text, intra=intra or default["intra"], inter=inter or default["inter"])
    if inter is None and "inter" not in named and cluster.hosts > 1:
        assumed.append(f"--inter {INTER}")
    if intra is None and "intra" not in named and cluster.ranks_per_host > 1:
        assumed.append(f"--intra {INTRA}")
    notes = (f"Assumed, because not given: {', '.join(assumed)}.",) if assumed else ()
    return _in_racks(cluster, arguments), notes


def _in_racks(cluster: Cluster, arguments: argparse.Namespace) -> Cluster:
    if arguments.rack is None:
        if arguments.oversubscription:
            raise BadOption("--oversubscription is about racks: give the hosts of each with --rack")
        return cluster
    if cluster.above:
        raise BadOption(f"--rack: the cluster has {cluster.above[0].name}s already ({cluster.shape}); leave it out")
    return cluster.with_racks(arguments.rack, oversubscription=parse_ratio(arguments.oversubscription or "1:1"))
