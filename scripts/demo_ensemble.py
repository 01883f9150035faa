#!/usr/bin/env python3
"""The demo's acceptance: the jump of the loss over noise replicas of a recipe's initial state.

One trajectory near an instability is one chaotic draw, so a recipe is judged by an ensemble: replicas
multiply every initial parameter by 1 + sigma * N(0, 1) and train `--steps` updates. The jump of a
replica is the largest rise of the evaluation loss over its running minimum.

    scripts/demo_ensemble.py --retrace build/retrace --recipe examples/demo.toml --data data/gcide

prints each replica's jump and first gradient norm and, per policy, whether the median jump exceeds
1 nat and at least 10 of 12 replicas exceed 0.5 nat. Exit status 1 where a policy fails.
"""
import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stderr}")
    return result.stdout


def jump(losses):
    best, largest = losses[0], 0.0
    for loss in losses[1:]:
        largest = max(largest, loss - best)
        best = min(best, loss)
    return largest


def ensemble(args, policy, work):
    parent = work / policy
    common = ["--tp", str(args.tp), "--quiet"]
    settings = [f"precision.preset={policy}", f"data.path={args.data}", *args.set]
    sets = [word for setting in settings for word in ("--set", setting)]
    run([args.retrace, "train", args.recipe, "-o", parent, "--until", "0", *sets, *common])
    jumps = []
    for seed in range(1, args.replicas + 1):
        branch = work / f"{policy}-{seed}"
        out = run([args.retrace, "replay", parent, "--steps", f"1..{args.steps}", "--do",
                   f"perturb:sigma={args.sigma!r},seed={seed}", "--keep", "records", "--out", branch,
                   "--json", *common])
        updates = json.loads(out)["updates"]
        shutil.rmtree(branch)
        losses = [update["evaluation_loss"] for update in updates]
        norms = [update["gradient_norm"] for update in updates]
        jumps.append(jump(losses))
        print(f"  {policy:5} replica {seed:2}: jump {jumps[-1]:6.3f} nat, |g| {norms[0]:.3g} at update 1,"
              f" {min(norms):.3g} at the least", flush=True)
    return jumps


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--retrace", default="build/retrace")
    parser.add_argument("--recipe", default="examples/demo.toml")
    parser.add_argument("--data", default="data/gcide", help="prefix of the dataset")
    parser.add_argument("--policies", default="fp32,bf16")
    parser.add_argument("--replicas", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sigma", type=float, default=2.0**-10)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the recipe")
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as directory:
        for policy in args.policies.split(","):
            jumps = ensemble(args, policy, pathlib.Path(directory))
            above = sum(j > 0.5 for j in jumps)
            median = statistics.median(jumps)
            passed = median > 1.0 and above >= round(len(jumps) * 10 / 12)
            good = good and passed
            print(f"{policy}: median jump {median:.3f} nat; {above} of {len(jumps)} above 0.5 nat: "
                  f"{'accepted' if passed else 'not accepted'}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
