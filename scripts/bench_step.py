#!/usr/bin/env python3
"""A whole training step of retrace against PyTorch's, in one run.

    scripts/bench_step.py [examples/bench_spike.toml] [--rounds 5] [--updates 3] [--threads 2]
                          [--precision fp32] [--no-compile] [--json FILE]

The peer is transformers' Gemma 4 (sdpa attention, FP32) with torch.optim.AdamW(fused=True) and
clip_grad_norm_(foreach=True): the same configuration, batch and threads, random tokens on both
sides. Eager runs with OpenMP's default waiting and with passive waiting, and the faster one counts;
torch.compile runs after 10 updates. The programs take turns within each round and never run at the
same time; a ratio is the median over rounds of (peer's median seconds / retrace's median seconds).
Peak memory is the largest resident set of each process.

retrace must be built (scripts/build.sh). The peer's packages (peer_requirements.txt) are installed
on the first call by scripts/setup.sh --for-peers.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def peer_python():
    """The Python of the peer's virtual environment, installed when it is missing."""
    subprocess.run([ROOT / "scripts/setup.sh", "--for-peers"], check=True)
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    return cache / "retrace/peer-python/bin/python"


def resident_peak(pid):
    """Largest resident set so far, in MiB."""
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM in /proc")


# --- the peer, in its own process: reads a number of updates a line, prints their seconds ---------


def gemma(recipe):
    """transformers' Gemma 4 with the recipe's shapes."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    def key(name):
        return recipe["model." + name]

    sizes = dict(
        vocab_size=key("vocab_size"), hidden_size=key("hidden_size"),
        intermediate_size=key("intermediate_size"), num_hidden_layers=key("layers"),
        num_attention_heads=key("query_heads"), num_key_value_heads=key("kv_heads"),
        num_global_key_value_heads=key("global_kv_heads"), head_dim=key("head_dim"),
        global_head_dim=key("global_head_dim"), attention_k_eq_v=key("attention_k_eq_v"),
        layer_types=[f"{kind}_attention" for kind in key("layer_types")],
        sliding_window=key("sliding_window"), rms_norm_eps=key("rms_norm_eps"),
        final_logit_softcapping=key("final_logit_softcapping") or None,
        tie_word_embeddings=key("tie_word_embeddings"),
        max_position_embeddings=max(512, recipe["data.sequence_length"]),
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, enable_moe_block=False,
        vocab_size_per_layer_input=key("vocab_size"), use_cache=False,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": key("sliding_rope_theta")},
            "full_attention": {"rope_type": "proportional", "rope_theta": key("full_rope_theta"),
                               "partial_rotary_factor": key("full_partial_rotary_factor")},
        })
    return Gemma4ForCausalLM._from_config(Gemma4TextConfig(**sizes), attn_implementation="sdpa")


def run_peer(recipe, threads, compiled):
    import time

    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = gemma(recipe).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-4, betas=(recipe["optimizer.beta1"], recipe["optimizer.beta2"]),
        eps=recipe["optimizer.eps"], weight_decay=recipe["optimizer.weight_decay"], fused=True)
    length, rows = recipe["data.sequence_length"], recipe["data.micro_batch_size"]
    micro_batches = recipe["data.micro_batches"]

    def loss_of(ids, labels):
        logits = model(input_ids=ids).logits
        return torch.nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), labels.view(-1)) / micro_batches

    if compiled:
        loss_of = torch.compile(loss_of)

    def update():
        optimizer.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            tokens = torch.randint(recipe["model.vocab_size"], (rows, length + 1))
            loss_of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, recipe["optimizer.clip"] or 1.0, foreach=True)
        optimizer.step()

    for _ in range(10 if compiled else 2):
        update()
    print(json.dumps({"parameters": sum(p.numel() for p in parameters)}), flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            update()
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


class Peer:
    def __init__(self, name, python, recipe, args, environment, compiled):
        self.name = name
        self.process = subprocess.Popen(
            [python, __file__, "--as-peer", json.dumps(recipe), "--threads", str(args.threads)]
            + (["--compiled"] if compiled else []),
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.parameters = json.loads(self.answer())["parameters"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"bench_step: the peer '{self.name}' ended early")
        return line

    def updates(self, count):
        print(count, file=self.process.stdin, flush=True)
        return statistics.median(json.loads(self.answer()))

    def close(self):
        peak = resident_peak(self.process.pid)
        self.process.stdin.close()
        self.process.wait()
        return peak


# --- retrace, a process a round (it starts in milliseconds) -----------------------------------------


class Retrace:
    name = "retrace"

    def __init__(self, args):
        self.command = [ROOT / "build/retrace", "bench", "step", args.recipe, "--random-tokens",
                        "--json", "--quiet", "--threads", str(args.threads), "--tp", str(args.tp)]
        for value in args.set or []:
            self.command += ["--set", value]
        self.peak = 0

    def updates(self, count):
        process = subprocess.Popen([*self.command, "--updates", str(count)],
                                   stdout=subprocess.PIPE, text=True)
        result = json.load(process.stdout)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit("bench_step: retrace failed")
        self.peak = max(self.peak, usage.ru_maxrss / 1024)
        return result["median_seconds"]

    def close(self):
        return self.peak


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", default=str(ROOT / "examples/bench_spike.toml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=3, help="timed in each round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="ranks of retrace")
    parser.add_argument("--set", action="append", help="KEY=VALUE for retrace's side")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--as-peer", metavar="RECIPE", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_peer:
        run_peer(json.loads(args.as_peer), args.threads, args.compiled)
        return

    printed = subprocess.run([ROOT / "build/retrace", "recipe", "print", args.recipe, "--json"],
                             check=True, capture_output=True, text=True)
    recipe = json.loads(printed.stdout)
    python = peer_python()
    print("bench_step: warming up", flush=True)
    sides = [Retrace(args),
             Peer("eager", python, recipe, args, {}, False),
             Peer("eager, passive waiting", python, recipe, args,
                  {"OMP_WAIT_POLICY": "PASSIVE"}, False)]
    if not args.no_compile:
        sides += [Peer("compiled", python, recipe, args, {}, True),
                  Peer("compiled, passive waiting", python, recipe, args,
                       {"OMP_WAIT_POLICY": "PASSIVE"}, True)]
    seconds = {side.name: [] for side in sides}
    for round_number in range(args.rounds):
        for side in sides:
            seconds[side.name].append(side.updates(args.updates))
        print(f"bench_step: round {round_number + 1}/{args.rounds}: "
              + ", ".join(f"{name} {times[-1]:.3f} s" for name, times in seconds.items()),
              flush=True)
    peaks = {side.name: side.close() for side in sides}

    print(f"\n{args.recipe}: {sides[1].parameters} parameters in the peer, {args.threads} threads")
    print(f"{'':26}{'s/update':>10}{'peer/retrace':>14}{'peak MiB':>10}")
    rows = []
    for side in sides:
        times = seconds[side.name]
        ratio = statistics.median(t / r for t, r in zip(times, seconds["retrace"]))
        rows.append({"name": side.name, "seconds": statistics.median(times), "ratio": ratio,
                     "peak_mib": peaks[side.name]})
        print(f"{side.name:26}{rows[-1]['seconds']:10.3f}{ratio:14.2f}{peaks[side.name]:10.0f}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"recipe": args.recipe, "rows": rows},
                                                      indent=1) + "\n")


if __name__ == "__main__":
    main()
