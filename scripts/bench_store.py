#!/usr/bin/env python3
"""Keeping every step: retrace's journals beside PyTorch's ways to save the same state, in one run.

    scripts/bench_store.py RUN RECIPE [--set KEY=VALUE ...] [--saves 5] [--threads 2] [--dir DIR]
                           [--json FILE]

RUN is a recording with journals (its bytes are counted), RECIPE what its updates are timed with. The
peers save parameters, m and v of the same tensors (FP32, random values): torch.save,
torch.distributed.checkpoint (save, and async_save with its default staging), each to a new folder of
DIR, each followed by fsync of its files, as retrace does. The columns: bytes a parameter and step; how
long the training thread is held; how long until the step is durable. Programs never run at the same
time; figures are medians.

retrace must be built (scripts/build.sh). The peer's packages (peer_requirements.txt) are installed on
the first call by scripts/setup.sh --for-peers.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "build/retrace"


def peer_python():
    """The Python of the peer's virtual environment, installed when it is missing."""
    subprocess.run([ROOT / "scripts/setup.sh", "--for-peers"], check=True)
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    return cache / "retrace/peer-python/bin/python"


# --- the peers, in a process of their own -----------------------------------------------------------


def sync_tree(folder):
    """Makes all below `folder` durable. -> bytes"""
    size = 0
    for root, _, names in os.walk(folder):
        for name in names + ["."]:
            path = os.path.join(root, name)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            size += os.path.getsize(path) if name != "." else 0
    return size


def run_peers(sizes, saves, threads, folder):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    state = {f"{component}.{i}": torch.randn(size)
             for component in ("p", "m", "v") for i, size in enumerate(sizes)}
    dist.init_process_group("gloo", rank=0, world_size=1,
                            store=dist.FileStore(os.path.join(folder, "store"), 1))

    def torch_save(path):
        os.makedirs(path)
        torch.save(state, os.path.join(path, "state.pt"))

    def save(path):
        checkpoint.save(state, checkpoint_id=path)

    def async_save(path):
        return checkpoint.async_save(state, checkpoint_id=path)

    results = {}
    for name, function in (("torch.save", torch_save), ("distributed.checkpoint.save", save),
                           ("distributed.checkpoint.async_save", async_save)):
        held, durable, size = [], [], 0
        for i in range(saves + 1):  # the first is not counted
            path = os.path.join(folder, "peer")
            begin = time.perf_counter()
            future = function(path)
            if future is None:
                size = sync_tree(path)  # what is synchronous holds until it is durable
            held.append(time.perf_counter() - begin)
            if future is not None:
                future.result()
                size = sync_tree(path)
            durable.append(time.perf_counter() - begin)
            shutil.rmtree(path)
        results[name] = {"bytes": size, "held_seconds": statistics.median(held[1:]),
                         "durable_seconds": statistics.median(durable[1:])}
    dist.destroy_process_group()
    print(json.dumps(results))


# --- both -------------------------------------------------------------------------------------------


def retrace(*words):
    done = subprocess.run([PROGRAM, *words, "--json", "--quiet"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dir", help="where files are written; a temporary folder by default")
    parser.add_argument("--random-tokens", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()

    use = retrace("du", args.run)
    parameters = use["parameters"]
    store = retrace("bench", "store", args.run)
    words = ["bench", "stall", args.recipe, "--threads", str(args.threads), "--updates",
             str(args.saves + 1), "--rounds", "2"]
    words += [word for value in args.set for word in ("--set", value)]
    words += ["--random-tokens"] if args.random_tokens else []
    words += ["--dir", args.dir] if args.dir else []
    stall = retrace(*words)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-store-") as folder:
        given = json.dumps({"sizes": [tensor["elements"] for tensor in use["tensors"]],
                            "saves": args.saves, "threads": args.threads, "folder": folder})
        done = subprocess.run([peer_python(), __file__, "--as-peer", given], check=True,
                              stdout=subprocess.PIPE, text=True)
    peers = json.loads(done.stdout.splitlines()[-1])

    rows = {"retrace, a journal a step": {
        "bytes": store["bytes_per_parameter"] * parameters,
        "held_seconds": stall["copy_seconds"], "durable_seconds": stall["durable_seconds"]}}
    rows.update(peers)
    own = rows["retrace, a journal a step"]
    print(f"{args.run}: {parameters} parameters; {args.recipe}; {args.threads} threads")
    print(f"{'':<36}{'bytes/parameter':>16}{'training held, ms':>19}{'durable, ms':>13}"
          f"{'ratios to retrace':>27}")
    for name, row in rows.items():
        ratios = "  ".join(f"{row[key] / own[key]:.2f}" for key in own)
        print(f"{name:<36}{row['bytes'] / parameters:>16.3f}{row['held_seconds'] * 1e3:>19.1f}"
              f"{row['durable_seconds'] * 1e3:>13.1f}{ratios:>27}")
    print(f"an update without a journal {stall['bare_seconds'] * 1e3:.1f} ms, with one "
          f"{stall['recorded_seconds'] * 1e3:.1f} ms ({100 * stall['stall']:+.1f} %), digest of the "
          f"state in both; idle processors: {stall['idle_processors']}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"rows": rows, "stall": stall, "store": store}, file, indent=2)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--as-peer":
        told = json.loads(sys.argv[2])
        run_peers(told["sizes"], told["saves"], told["threads"], told["folder"])
    else:
        main()
