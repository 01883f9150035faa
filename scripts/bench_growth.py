#!/usr/bin/env python3
"""How the cost of an update grows with tokens, layers, width, and that of a run with the steps it keeps.

    scripts/bench_growth.py [--threads 2] [--updates 5] [--rounds 3] [--json FILE]

Each axis doubles one size of a small model (examples/bench_spike.toml, shortened) five times and fits
cost = a * size^e to the upper half of the points, where fixed costs no longer show: the exponent e is
printed, and the points are plotted with both axes logarithmic. Time is the fastest median of several
rounds that take turns, memory the peak resident set above that of a process that computes nothing.
An exponent above its limit is said to grow faster than it should, and the exit code is 1.
"""
import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RETRACE = ROOT / "build/retrace"
BASE = {"model.layers": 4, "model.hidden_size": 128, "model.intermediate_size": 256,
        "model.query_heads": 2, "model.kv_heads": 1, "model.global_kv_heads": 1,
        "model.head_dim": 64, "model.global_head_dim": 64, "model.full_attention_every": 2,
        "model.vocab_size": 1024, "data.sequence_length": 64, "data.micro_batch_size": 4}


def width(factor):
    """Hidden size, FFN and the number of heads together."""
    return {"model.hidden_size": 64 * factor, "model.intermediate_size": 128 * factor,
            "model.query_heads": factor, "model.kv_heads": 1}


# name, unit of the cost -> largest exponent that is as it should be
AXES = {
    "tokens": ("sequences in a micro-batch of 64 tokens", [2, 4, 8, 16, 32],
               lambda n: {"data.micro_batch_size": n}, {"seconds": 1.15, "MiB": 1.15}),
    "layers": ("layers", [4, 8, 16, 32, 64], lambda n: {"model.layers": n},
               {"seconds": 1.15, "MiB": 1.15}),
    "width": ("heads of 64; hidden size and FFN grow with them", [1, 2, 4, 8, 16], width,
              {"seconds": 2.15, "MiB": 2.15}),
}


def run(words):
    """-> (standard output, peak resident MiB). The program's own words where it fails."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([str(w) for w in words], stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode != 0:
            sys.exit(f"bench_growth: {' '.join(map(str, words))}\n{err.read()}")
        return out.read(), usage.ru_maxrss / 1024


def sets(changes):
    return [w for key, value in {**BASE, **changes}.items() for w in ("--set", f"{key}={value}")]


def measure_update(changes, flags):
    text, peak = run([RETRACE, "bench", "step", ROOT / "examples/bench_spike.toml",
                      "--random-tokens", "--json", "--quiet", "--threads", flags.threads,
                      "--updates", flags.updates, *sets(changes)])
    return {"seconds": json.loads(text)["median_seconds"], "MiB": peak}


def measure_kept(steps, flags):
    """A run of so many updates that keeps every state: its bytes, and the time of a deep check."""
    with tempfile.TemporaryDirectory() as folder:
        words = [RETRACE, "train", ROOT / "examples/tiny.toml", "-o", folder + "/run", "--quiet",
                 "--set", f"steps={steps}", "--set", f"store.window=[0,{steps}]",
                 "--set", f"data.path={ROOT}/tests/data/dataset/tiny", "--threads", flags.threads]
        run(words)
        size = sum(f.stat().st_size for f in pathlib.Path(folder).rglob("*") if f.is_file())
        begin = time.monotonic()
        run([RETRACE, "fsck", folder + "/run", "--deep", "--quiet"])
        return {"MiB": size / 2**20, "seconds": time.monotonic() - begin}


def exponent(sizes, costs):
    """Slope of log cost over log size, least squares over the upper half."""
    points = [(math.log(s), math.log(c)) for s, c in zip(sizes, costs)][len(sizes) // 2:]
    x = sum(p[0] for p in points) / len(points)
    y = sum(p[1] for p in points) / len(points)
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def plot(sizes, costs, unit, rows=8, columns=48):
    """The points in a grid with logarithmic axes."""
    low, high = math.log(min(costs)), math.log(max(costs))
    left, right = math.log(sizes[0]), math.log(sizes[-1])
    grid = [[" "] * (columns + 1) for _ in range(rows + 1)]
    for size, cost in zip(sizes, costs):
        row = round((math.log(cost) - low) / ((high - low) or 1) * rows)
        grid[rows - row][round((math.log(size) - left) / (right - left) * columns)] = "o"
    for i, line in enumerate(grid):
        label = {0: f"{max(costs):.4g} {unit}", rows: f"{min(costs):.4g} {unit}"}.get(i, "")
        print(f"{label:>18} |{''.join(line).rstrip()}")
    print(" " * 19 + "+" + "-" * (columns + 1))
    print(" " * 20 + f"{sizes[0]:<{columns // 2}}{sizes[-1]:>{columns - columns // 2 + 1}}")


def measure(axis, sizes, one, flags):
    """{unit: [cost of each size]}; rounds take turns over the sizes."""
    least = [{} for _ in sizes]
    for turn in range(flags.rounds):
        for i, size in enumerate(sizes):
            for unit, cost in one(size).items():
                least[i][unit] = min(cost, least[i].get(unit, math.inf))
        print(f"bench_growth: {axis}, round {turn + 1}/{flags.rounds}", file=sys.stderr, flush=True)
    return {unit: [cost[unit] for cost in least] for unit in least[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count()))
    parser.add_argument("--updates", type=int, default=5, help="timed for each point and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    flags = parser.parse_args()
    if not RETRACE.exists():
        sys.exit(f"bench_growth: no {RETRACE}; run scripts/build.sh")
    _, idle = run([RETRACE, "--version"])
    results, steeper = {}, []

    def report(axis, what, sizes, costs, limits):
        print(f"\n{axis}: {what}")
        results[axis] = {"sizes": sizes, "costs": costs, "exponents": {}}
        for unit, values in costs.items():
            e = results[axis]["exponents"][unit] = exponent(sizes, values)
            verdict = "as it should" if e <= limits[unit] else "FASTER than it should"
            if e > limits[unit]:
                steeper.append(f"{axis}, {unit}")
            plot(sizes, values, unit)
            print(f"{'':19} {unit} ~ {axis}^{e:.2f} (at most {limits[unit]:g}): {verdict}")

    for axis, (what, sizes, changes, limits) in AXES.items():
        costs = measure(axis, sizes, lambda n: measure_update(changes(n), flags), flags)
        costs["MiB"] = [max(m - idle, 0.1) for m in costs["MiB"]]
        report(axis, what, sizes, costs, limits)
    sizes = [8, 16, 32, 64, 128]
    costs = measure("steps kept", sizes, lambda n: measure_kept(n, flags), flags)
    report("steps kept", "updates whose states are all kept: bytes on disk, time of fsck --deep",
           sizes, costs, {"MiB": 1.1, "seconds": 1.15})
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(results, indent=1) + "\n")
    print()
    if steeper:
        print("Grows faster than it should: " + "; ".join(steeper))
    return 1 if steeper else 0


if __name__ == "__main__":
    sys.exit(main())
