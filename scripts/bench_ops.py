#!/usr/bin/env python3
"""Fused ops and attention of retrace against ATen's, in one run.

    scripts/bench_ops.py [RECIPE ...] [--rounds 5] [--threads 2]

Ops: one thread, 256 x 256 elements, as `retrace bench ops` measures them, beside the ATen calls that
compute the same: torch.nn.functional.rms_norm or layer_norm, whichever is faster; softmax; gelu (tanh)
times the other half; tanh for the softcap; logsumexp and the gradient of cross_entropy; backward
passes by the backward kernels that autograd calls. Attention: forward and backward of
scaled_dot_product_attention on each recipe's shapes (`retrace bench attention`), the window as a mask,
is_causal where there is none, beside the better of retrace's two kinds. Programs take turns; a ratio is
the median over rounds of (peer's time / retrace's time), each time that of the fastest of several calls.
The peer's packages (peer_requirements.txt) are installed on the first call.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys

from bench_step import ROOT, peer_python

ROWS = COLUMNS = 256  # as in cmd/bench.cc


# --- the peer, in its own process ---------------------------------------------------------------


def fastest(call, seconds):
    import time
    call()
    best, spent = math.inf, 0.0
    while spent < seconds:
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        best, spent = min(best, took), spent + took
    return best


def aten_ops(seconds):
    """{retrace's name: seconds of a call}."""
    import torch
    import torch.nn.functional as F
    aten = torch.ops.aten
    x, y, d = (torch.randn(ROWS, COLUMNS) for _ in range(3))
    w = torch.randn(COLUMNS)
    ids = torch.randint(0, COLUMNS, (ROWS,))
    p = torch.softmax(x, -1)
    log_p = torch.log_softmax(x, -1)
    tanh = torch.tanh(x)
    normed, mean, rstd = aten.native_layer_norm(x, [COLUMNS], w, None, 1e-6)

    def gelu_backward():
        aten.gelu_backward(d * y, x, approximate="tanh")
        return d * F.gelu(x, approximate="tanh")

    def norm_backward(inputs):
        return lambda: aten.native_layer_norm_backward(d, x, [COLUMNS], mean, rstd, w, None,
                                                       [inputs, not inputs, False])

    calls = {
        "embed": [lambda: F.embedding(ids, y)],
        "rms_norm": [lambda: F.rms_norm(x, [COLUMNS], w, 1e-6),
                     lambda: aten.native_layer_norm(x, [COLUMNS], w, None, 1e-6)],
        "rms_norm_backward": [norm_backward(True)],
        "rms_norm_weight": [norm_backward(False)],
        "softmax": [lambda: torch.softmax(x, -1)],
        "softmax_backward": [lambda: aten._softmax_backward_data(d, p, -1, torch.float32)],
        "geglu": [lambda: F.gelu(x, approximate="tanh") * y],
        "geglu_backward": [gelu_backward],
        "softcap": [lambda: torch.tanh(x / 30.0) * 30.0],
        "softcap_backward": [lambda: aten.tanh_backward(d, tanh)],
        "sum_exp": [lambda: torch.logsumexp(x, -1)],
        "cross_entropy_backward": [lambda: aten._log_softmax_backward_data(d, log_p, -1,
                                                                           torch.float32)],
        "add": [lambda: torch.add(x, y)],
        "scale": [lambda: torch.mul(x, 0.5)],
    }
    return {name: min(fastest(call, seconds / len(alternatives)) for call in alternatives)
            for name, alternatives in calls.items()}


def sdpa(row, seconds):
    """(forward, backward) seconds of a call."""
    import torch
    import torch.nn.functional as F
    length, heads = row["length"], row["query_heads"]

    def operand(count):
        return torch.randn(row["sequences"], count, length, row["head_dim"], requires_grad=True)

    q, k, v = operand(heads), operand(row["kv_heads"]), operand(row["kv_heads"])
    mask = None
    if 0 < row["window"] < length:
        i = torch.arange(length)
        near = (i[:, None] >= i) & (i[:, None] - i < row["window"])
        mask = torch.zeros(length, length).masked_fill(~near, -math.inf)

    def forward():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                              enable_gqa=row["kv_heads"] != heads)

    output = forward()
    doutput = torch.randn_like(output)
    backward = lambda: torch.autograd.grad(output, (q, k, v), doutput, retain_graph=True)
    with torch.no_grad():
        took = fastest(forward, seconds)
    return took, fastest(backward, seconds)


def be_peer(threads):
    import torch
    torch.set_num_threads(threads)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = (aten_ops(asked["seconds"]) if asked["rows"] is None else
                  [sdpa(row, asked["seconds"]) for row in asked["rows"]])
        print(json.dumps(answer), flush=True)


# --- this side ----------------------------------------------------------------------------------


class Peer:
    def __init__(self, python, threads):
        self.process = subprocess.Popen(
            [python, __file__, "--as-peer", str(threads)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})

    def ask(self, rows, seconds):
        print(json.dumps({"rows": rows, "seconds": seconds}), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def retrace(*words):
    command = [ROOT / "build/retrace", "bench", *words, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def show(name, ours, theirs, ratios):
    ratio = statistics.median(ratios)
    print(f"{name:44}{statistics.median(ours):11.4f}{statistics.median(theirs):11.4f}{ratio:8.2f}",
          flush=True)
    return ratio


def bench_ops(args, python):
    peer = Peer(python, 1)
    ours, theirs = [], []
    for _ in range(args.rounds):
        rows = retrace("ops", "--seconds", str(args.seconds))["rows"]
        ours.append({r["op"]: r["nanoseconds_per_element"] for r in rows})
        theirs.append({op: s / (ROWS * COLUMNS) * 1e9
                       for op, s in peer.ask(None, args.seconds / 4).items()})
    peer.close()
    print(f"\nops, one thread, {ROWS} x {COLUMNS}, FP32\n{'ns an element':44}{'retrace':>11}{'ATen':>11}"
          f"{'ratio':>8}")
    for op in theirs[0]:
        a, b = [o[op] for o in ours], [t[op] for t in theirs]
        show(op, a, b, [y / x for x, y in zip(a, b)])


def bench_attention(recipe, args, python):
    peer = Peer(python, args.threads)
    rounds = []
    for _ in range(args.rounds):
        rows = retrace("attention", recipe, "--no-scalar", "--threads", str(args.threads),
                       "--seconds", str(args.seconds))["rows"]
        rounds.append((rows, peer.ask(rows, args.seconds / 2)))
    peer.close()
    print(f"\n{recipe}, attention, {args.threads} threads, FP32\n{'milliseconds':44}{'retrace':>11}"
          f"{'sdpa':>11}{'ratio':>8}")
    for i, row in enumerate(rounds[0][0]):
        for part, key in enumerate(("forward_seconds", "backward_seconds")):
            a = [rows[i][key] * 1e3 for rows, _ in rounds]
            b = [answer[i][part] * 1e3 for _, answer in rounds]
            show(f"{row['attention']}, {key.split('_')[0]}", a, b, [y / x for x, y in zip(a, b)])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=[
        str(ROOT / "examples/bench_spike.toml"), str(ROOT / "examples/bench_100m.toml")])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of attention")
    parser.add_argument("--seconds", type=float, default=0.2, help="about, for each row and round")
    parser.add_argument("--as-peer", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_peer:
        return be_peer(args.as_peer)
    python = peer_python()
    bench_ops(args, python)
    for recipe in args.recipes:
        bench_attention(recipe, args, python)


if __name__ == "__main__":
    main()
