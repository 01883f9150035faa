#!/usr/bin/env python3
"""retrace's portable matrix products against MKL's (torch.mm, torch.bmm), in one run.

    scripts/bench_gemm.py [RECIPE...] [--rounds 5] [--threads 1 2] [--seconds 0.1]

The shapes are those of the recipes (default: examples/bench_spike.toml and examples/bench_100m.toml).
In each round retrace measures all shapes and then the peer does, with the same vector instructions
(MKL_ENABLE_INSTRUCTIONS) and number of threads; a shape's figure is the median over rounds of
(retrace's GFLOP/s / MKL's). retrace must be built; the peer's packages are installed by
scripts/setup.sh --for-peers.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys

from bench_step import ROOT, peer_python


def run_peer(threads):
    """Reads a list of rows a line, prints the GFLOP/s of each, of the fastest of several runs."""
    import time

    import torch

    torch.set_num_threads(threads)

    def operand(products, rows, cols, transposed):
        x = torch.rand(products, cols, rows).transpose(1, 2) if transposed else \
            torch.rand(products, rows, cols)
        return x if products > 1 else x[0]

    def gflops(row, seconds):
        n = row["products"]
        a = operand(n, row["m"], row["k"], row["layout"][0] == "T")
        b = operand(n, row["k"], row["n"], row["layout"][1] == "T")
        multiply = torch.bmm if n > 1 else torch.mm
        out = multiply(a, b)
        flops = 2.0 * n * row["m"] * row["n"] * row["k"]
        calls = 1 + int(2e6 / flops)
        best = elapsed = 0.0
        runs = 0
        while runs < 3 or elapsed < seconds:
            begin = time.perf_counter()
            for _ in range(calls):
                multiply(a, b, out=out)
            took = time.perf_counter() - begin
            best = max(best, flops * calls / took / 1e9)
            elapsed += took
            runs += 1
        return best

    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps([gflops(row, asked["seconds"]) for row in asked["rows"]]), flush=True)


def measure(recipe, threads, args, python):
    command = [ROOT / "build/retrace", "bench", "gemm", recipe, "--json", "--no-scalar",
               "--threads", str(threads), "--seconds", str(args.seconds)]
    shapes, ours, theirs = None, [], []
    peer = None
    for _ in range(args.rounds):
        result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        shapes = result["rows"]
        ours.append([row["gflops"] for row in shapes])
        if peer is None:
            isa = {"avx2": "AVX2", "avx512": "AVX512"}.get(result["isa"], "SSE4_2")
            peer = subprocess.Popen(
                [python, __file__, "--as-peer", str(threads)], text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "MKL_ENABLE_INSTRUCTIONS": isa, "OMP_WAIT_POLICY": "PASSIVE"})
        print(json.dumps({"rows": shapes, "seconds": args.seconds}), file=peer.stdin, flush=True)
        theirs.append(json.loads(peer.stdout.readline()))
    peer.stdin.close()
    peer.wait()

    print(f"\n{recipe}, {threads} thread(s), {result['isa']}")
    print(f"{'product':22}{'layout':8}{'products':>9}{'m':>7}{'n':>7}{'k':>7}{'GFLOP/s':>9}"
          f"{'MKL':>8}{'ratio':>7}")
    ratios = []
    for i, row in enumerate(shapes):
        ratio = statistics.median(a[i] / b[i] for a, b in zip(ours, theirs))
        ratios.append(ratio)
        print(f"{row['product']:22}{row['layout']:8}{row['products']:9}{row['m']:7}{row['n']:7}"
              f"{row['k']:7}{statistics.median(a[i] for a in ours):9.1f}"
              f"{statistics.median(b[i] for b in theirs):8.1f}{ratio:7.2f}")
    print(f"geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.2f}, "
          f"smallest {min(ratios):.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="*", default=[
        str(ROOT / "examples/bench_spike.toml"), str(ROOT / "examples/bench_100m.toml")])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.1, help="about, for each shape")
    parser.add_argument("--as-peer", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_peer:
        run_peer(args.as_peer)
        return
    python = peer_python()
    for recipe in args.recipes:
        for threads in args.threads:
            measure(recipe, threads, args, python)


if __name__ == "__main__":
    main()
