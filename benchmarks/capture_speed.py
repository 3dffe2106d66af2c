"""Time compile_step, and divide by the nodes of the graph.

    python benchmarks/capture_speed.py --json capture_speed.json [--against DIRECTORY]

A small transformer with dropout, of more and more layers, with SGD (nearly all nodes are forward and backward) and with
AdamW (most are updates); on one rank, so nothing is measured or communicated. Times are processor time. `--against`
names another checkout, which takes turns with this one; each turn is a process of its own, so that neither warms up
the other. A record is `{checkout, optimizer, layers, nodes, s, ms_per_node}`, the median of the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (4, 16, 48)
OPTIMIZERS = ("SGD", "AdamW")

TURN = """
import json, sys, time, warnings
import torch
from torch import nn
import fxcomp
torch.set_num_threads(1)
warnings.simplefilter("ignore")

class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mix = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
        )
    def forward(self, x):
        h = self.first(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return x + self.mix(self.second(x))

def compiled(layers, optimizer):
    model = nn.Sequential(nn.Embedding(20, 16), *[Block() for _ in range(layers)], nn.Linear(16, 20))
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    start = time.process_time()
    step = fxcomp.compile_step(model, loss, steps, torch.randint(0, 20, (2, 5)))
    return time.process_time() - start, len(step.graph().graph.nodes)

compiled(1, "SGD")  # imports
print(json.dumps(compiled(int(sys.argv[1]), sys.argv[2])))
"""


def turn(checkout: Path, layers: int, optimizer: str) -> tuple[float, int]:
    """Processor seconds, and the nodes of the final graph."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TURN, str(layers), optimizer]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=True)
    seconds, nodes = json.loads(done.stdout.splitlines()[-1])
    return seconds, nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="DIRECTORY")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    checkouts = {"this": ROOT} | ({"other": arguments.against.resolve()} if arguments.against else {})
    found: dict[tuple[str, str, int], list[tuple[float, int]]] = defaultdict(list)
    for _ in range(arguments.turns):
        for layers in LAYERS:
            for optimizer in OPTIMIZERS:
                for name, checkout in checkouts.items():
                    found[name, optimizer, layers].append(turn(checkout, layers, optimizer))
    records: list[dict[str, object]] = []
    for (name, optimizer, layers), turns in found.items():
        seconds, nodes = statistics.median(s for s, _ in turns), turns[0][1]
        ms = 1e3 * seconds / nodes
        records.append(
            {"checkout": name, "optimizer": optimizer, "layers": layers, "nodes": nodes, "s": seconds,
             "ms_per_node": ms}
        )  # fmt: skip
        print(f"{name:6} {optimizer:6} {layers:3} layers {nodes:6} nodes {seconds:6.2f} s {ms:.3f} ms a node")
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
