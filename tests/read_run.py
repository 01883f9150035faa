"""An independent reader of run directories, written from formats/FORMAT.md and clause 12 of
core/NUMERICS.md alone. It shares no code with retrace and adds no tolerance anywhere.

usage: read_run.py RUN [--positions A..B]

Checks the ledger's chain, the recipe and manifest, every file of the kept positions, and the digest
of every piece; rebuilds RUN@k for every k that has a keyframe at or before it and the journals from
there on, by AdamW in FP32, and compares its digest with the ledger's, bit for bit. Exit code 1 on
any mismatch. Memory: one state and one step.
"""
import argparse
import io
import json
import pathlib
import re
import sys

import h5py
import hdf5plugin  # noqa: F401  registers the zstd filter
import numpy as np
import xxhash

FORMAT_ID = 1
BLOCK_BYTES = 2**20
CHUNK_ELEMENTS = 2**18
TAIL = re.compile(rb',"digest":"([0-9a-f]{32})"\}\Z')
TAIL_BYTES = 45
STATE_KINDS = ("p", "m", "v")
PARTIAL_KINDS = tuple("partial_" + kind for kind in STATE_KINDS)
UPDATE, SKIP, FROZEN = 0, 1, 2  # actions of an optimizer row


class Damage(Exception):
    """The run is not what it says; the text says where."""


def check(condition, *what):
    if not condition:
        raise Damage(" ".join(str(word) for word in what))


def check_same(what, expected, got):
    check(expected == got, f"{what}: expected {expected}, got {got}")


def digest(data):
    return xxhash.xxh3_128_digest(data)  # canonical form: big-endian


def tensor_digest(values):
    data = values.tobytes()
    blocks = (data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES))
    return digest(b"".join(digest(block) for block in blocks))


# ---- Ledger


def body_of(line):
    """The bytes that a whole line's digest covers, and the digest; None where it is not whole."""
    tail = TAIL.search(line)
    if not line.startswith(b"{") or tail is None:
        return None
    body, text = line[:-TAIL_BYTES], tail.group(1).decode()
    return (body, text) if digest(body).hex() == text else None


def check_end(rest, number):
    """What follows the last whole line is nothing or a torn line; everything else is damage."""
    check(b"\n" not in rest, f"ledger line {number}: its digest does not fit its bytes")
    check(body_of(rest[:-1]) is None,
          f"ledger line {number}: ends in {rest[-1:]!r} instead of a line break")


def read_lines(data):
    """Ledger lines as objects, each with its digest under "digest"; and whether one is torn."""
    lines, previous = [], "0" * 32
    *whole, rest = data.split(b"\n")
    for number, line in enumerate(whole, 1):
        parts = body_of(line)
        if parts is None:
            check_end(b"\n".join(whole[number - 1 :] + [rest]), number)
        body, text = parts
        entry = json.loads(line)
        check(body.endswith(b'"previous":"%s"' % previous.encode()),
              f"ledger line {number}: previous: expected {previous}, got {entry.get('previous')}")
        lines.append(entry)
        previous = text
    check(lines, "ledger: no whole line")
    if rest:
        check_end(rest, len(lines) + 1)
    return lines, bool(rest)


class Run:
    """A run's ledger, recipe and manifest, read and checked."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.lines, self.torn = read_lines((self.folder / "ledger.jsonl").read_bytes())
        self.header = self.lines[0]
        check_same("ledger line 1: kind", "open", self.header["kind"])
        check_same("ledger line 1: format", FORMAT_ID, self.header["format"])
        for name in ("recipe.toml", "manifest.json"):
            expected = self.header[name.split(".")[0]]
            check_same(name + ": digest", expected, digest(self.read(name)).hex())
        self.shards, self.first = self.header["shards"], self.header["first"]
        self.positions = {}  # k: the ledger's line of RUN@k, its `master` kept up to date
        self.attempts = 0
        for number, line in enumerate(self.lines[1:], 2):
            try:
                self.add(line)
            except Damage as damage:
                raise Damage(f"ledger line {number}: {damage}") from None

    def read(self, name):
        return (self.folder / name).read_bytes()

    def add(self, line):
        kind, k = line["kind"], line.get("k")
        if kind == "attempt":
            self.attempts += 1
            check_same("attempt", self.attempts, line["attempt"])
        elif kind in ("start", "update"):
            check((kind == "start") == (not self.positions), f"a line of kind {kind} here")
            check_same("k", self.first + len(self.positions), k)
            check_same("counters.position", k, line["counters"]["position"])
            self.positions[k] = line
        elif kind == "files":
            check(k in self.positions, f"files of position {k}, which the run has not got to")
            self.positions[k]["master"] = line["master"]
        elif kind == "retire":
            for retired in range(line["first"], line["last"] + 1):
                self.positions.get(retired, {}).pop("master", None)
        elif kind == "keep":
            check(line["first"] <= line["last"] + 1, f"keep of {line['first']}..{line['last']}")
        else:
            raise Damage(f"unknown kind {kind}")

    def kinds(self, k):
        return self.positions[k].get("master", {}).get("kinds", [])

    def parent(self):
        """The run that this one branched from: under its path, else next to this run."""
        lineage = self.header["lineage"]
        path = pathlib.Path(lineage["parent"])
        for folder in (path, self.folder.resolve().parent / path.name):
            if (folder / "ledger.jsonl").exists():
                parent = Run(folder)
                if parent.lines[0]["digest"] == lineage["parent_run"]:
                    return parent
        raise Damage(f"the parent {path} is needed and is not there; run this where the branch "
                     "was made, or place the parent next to it")


# ---- Steps


def file_name(position, attempt, rank=None):
    text = f"{position:09d}.a{attempt:04d}"
    return text + (".h5" if rank is None else f".r{rank:04d}.h5")


class Files:
    """What has been read, for the summary."""

    def __init__(self):
        self.count = self.bytes = self.pieces = 0

    def open(self, folder, entry):
        """The HDF5 file of an entry {name, size, digest}: exactly the bytes that were digested."""
        data = (folder / "steps" / entry["name"]).read_bytes()
        check_same(entry["name"] + ": size", entry["size"], len(data))
        check_same(entry["name"] + ": digest", entry["digest"], digest(data).hex())
        self.count, self.bytes = self.count + 1, self.bytes + len(data)
        return h5py.File(io.BytesIO(data), "r")


def read_index(file):
    return json.loads(bytes(file["index"][...]))


class Layout:
    """The pieces of every shard, learned from the rank files, which have to agree."""

    def __init__(self):
        self.tables = {}

    def add(self, shard, table):
        names = [piece[0].encode() for piece in table]
        check(names == sorted(names), f"shard {shard}: pieces are not in the order of name bytes")
        check_same(f"shard {shard}: pieces", self.tables.setdefault(shard, table), table)

    def tensors(self):
        names = {piece[0] for table in self.tables.values() for piece in table}
        return sorted(names, key=lambda name: name.encode())

    def check_complete(self, shards, tensors):
        check_same("shards with pieces", list(range(shards)), sorted(self.tables))
        check_same("number of tensors", tensors, len(self.tensors()))
        extent, area = {}, {}
        for table in self.tables.values():
            for name, r0, r1, c0, c1 in table:
                rows, cols = extent.get(name, (0, 0))
                extent[name] = max(rows, r1), max(cols, c1)
                area[name] = area.get(name, 0) + (r1 - r0) * (c1 - c0)
        for name, (rows, cols) in extent.items():
            check_same(name + ": elements in all pieces", rows * cols, area[name])


def read_slab(dataset, chunks):
    """A slab's numbers; its encoded chunks have to lie where the master says."""
    where = dataset.name
    check(dataset.dtype == np.dtype("<f4") and dataset.ndim == 1, where, "is not 1-D FP32")
    check_same(where + ": chunk", (min(dataset.size, CHUNK_ELEMENTS),), dataset.chunks)
    stored = (dataset.id.get_chunk_info(i) for i in range(dataset.id.get_num_chunks()))
    stored = sorted((info.chunk_offset[0], info.byte_offset, info.size) for info in stored)
    check_same(where + ": chunks", chunks,
               [number for _, offset, size in stored for number in (offset, size)])
    return dataset[...]


def read_rank_file(file, entry, layout, step, files):
    """Adds the file's pieces to step[kind][shard, piece]."""
    index = read_index(file)
    for member in ("position", "attempt", "rank"):
        check_same(f"{entry['name']}: {member}", entry[member], index[member])
    check_same(entry["name"] + ": format", FORMAT_ID, index["format"])
    for shard, table in index["shards"].items():
        layout.add(int(shard), table)
    own = {(slab["shard"], slab["kind"]): slab for slab in index["slabs"]}
    check_same(entry["name"] + ": slabs", sorted((s["shard"], s["kind"]) for s in entry["slabs"]),
               sorted(own))
    for slab in entry["slabs"]:
        shard, kind = slab["shard"], slab["kind"]
        where = f"{entry['name']}: shard {shard} {kind}"
        table = layout.tables[shard]
        pieces = own[shard, kind]["pieces"]
        whole = kind not in PARTIAL_KINDS
        check_same(where + ": pieces",
                   list(range(len(table))) if whole else slab["pieces"], pieces)
        dataset = own[shard, kind]["dataset"]
        check_same(where + ": dataset", f"/shard_{shard:04d}/{kind}", dataset)
        values, offset = read_slab(file[dataset], slab["chunks"]), 0
        check_same(where + ": digests", 32 * len(pieces), len(slab["digests"]))
        for i, piece in enumerate(pieces):
            name, r0, r1, c0, c1 = table[piece]
            cut = values[offset : offset + (r1 - r0) * (c1 - c0)].reshape(r1 - r0, c1 - c0)
            offset += cut.size
            check_same(f"{where} {name}: digest", slab["digests"][32 * i : 32 * i + 32],
                       tensor_digest(cut).hex())
            check((shard, piece) not in step.setdefault(kind, {}), where, name, "is there twice")
            step[kind][shard, piece] = cut
        check_same(where + ": size", offset, values.size)
        files.pieces += len(pieces)


def check_coverage(layout, step):
    """A whole kind holds every piece; a partial kind every piece of each tensor it touches."""
    every = {(shard, i): piece[0]
             for shard, table in layout.tables.items() for i, piece in enumerate(table)}
    for kind, pieces in step.items():
        touched = {every[key] for key in pieces} if kind in PARTIAL_KINDS else set(every.values())
        wanted = {key for key, name in every.items() if name in touched}
        check_same(kind + ": pieces", sorted(wanted), sorted(pieces))


def read_step(run, k, layout, files):
    """Master index and pieces by kind of position k."""
    master = run.positions[k]["master"]
    with files.open(run.folder, master) as file:
        index = read_index(file)
    check_same("master: format", FORMAT_ID, index["format"])
    check_same("master: position", k, index["position"])
    check_same("master: name", file_name(k, index["attempt"]), master["name"])
    check_same("master: counters", run.positions[k]["counters"], index["counters"])
    step = {}
    for entry in index["files"]:
        check_same("rank file: name", file_name(entry["position"], entry["attempt"], entry["rank"]),
                   entry["name"])
        with files.open(run.folder, entry) as file:
            read_rank_file(file, entry, layout, step, files)
    layout.check_complete(run.shards, index["counters"]["tensors"])
    check_coverage(layout, step)
    check_same("kinds", sorted(master["kinds"]), sorted(step))
    return index, step


# ---- States


def from_bits(bits):
    return np.array(bits, dtype="<u4").view("<f4")


def store(values):
    """NaNs are kept as 0x7fc00000."""
    return np.where(np.isnan(values), from_bits(0x7FC00000), values)


def adamw(piece, row, row_clips, p, m, v, g):
    """Clause 12, one rounding per operation: numpy's ufuncs are each one FP32 operation."""
    action = row[0]
    lr, b1, c1, b2, c2, bc1, bc2, eps, decay, clip, update_clip = from_bits(row[2:])
    if action == SKIP:
        return p, m, v
    if row_clips:
        clip = from_bits(row_clips[piece[1] : piece[2]])[:, None]
    g = clip * g
    m = b1 * m + c1 * g
    v = b2 * v + (c2 * g) * g
    if action == UPDATE:
        u = ((m / bc1) / (np.sqrt(v / bc2) + eps)) * update_clip + decay * p
        p = p - lr * u
    assert p.dtype == m.dtype == v.dtype == np.float32
    return store(p), store(m), store(v)


def adam_t_of(counters):
    t = counters["adam_t"]
    return t if isinstance(t, list) else [t] * counters["tensors"]


def check_optimizer(layout, optimizer, counters):
    tensors = layout.tensors()
    check(optimizer is not None, "a journal without an optimizer block")
    check_same("optimizer: rows", len(tensors), len(optimizer["rows"]))
    check(len(optimizer["row_clips"]) in (0, len(tensors)), "row_clips: one list per tensor")
    for name, row, t in zip(tensors, optimizer["rows"], adam_t_of(counters)):
        check(row[0] in (UPDATE, SKIP, FROZEN) and len(row) == 13, f"{name}: optimizer row {row}")
        check(row[0] == SKIP or row[1] == t, f"{name}: adam_t {t}, but t {row[1]} in its row")


def walk(layout, index, step, state):
    """RUN@k from RUN@(k-1): pieces changed by surgery, then the update."""
    state = {kind: state[kind] | step.get("partial_" + kind, {}) for kind in STATE_KINDS}
    optimizer = index["optimizer"]
    check_optimizer(layout, optimizer, index["counters"])
    number = {name: i for i, name in enumerate(layout.tensors())}
    after = {kind: {} for kind in STATE_KINDS}
    for key, g in step["g"].items():
        piece = layout.tables[key[0]][key[1]]
        tensor = number[piece[0]]
        clips = optimizer["row_clips"][tensor] if optimizer["row_clips"] else []
        moved = adamw(piece, optimizer["rows"][tensor], clips,
                      *(state[kind][key] for kind in STATE_KINDS), g)
        for kind, values in zip(STATE_KINDS, moved):
            after[kind][key] = values
    return after


def state_text(shards, counters, memory):
    lines = ["retrace state 1", f"shards {shards}"]
    lines += [f"{name} {counters[name]}" for name in ("position", "schedule_index", "data_cursor")]
    lines.append(" ".join(["adam_t"] + [str(t) for t in adam_t_of(counters)]))
    for name in sorted(memory, key=lambda name: name.encode()):
        lines.append(" ".join(["memory", name] + [f"{bits:016x}" for bits in memory[name]]))
    return "".join(line + "\n" for line in lines).encode()


def state_digest(layout, index, state):
    parts = [digest(state_text(len(layout.tables), index["counters"], index["memory"]))]
    for shard, table in sorted(layout.tables.items()):
        parts.append(digest(b"".join(tensor_digest(state[kind][shard, piece])
                                     for piece in range(len(table)) for kind in STATE_KINDS)))
    return digest(b"".join(parts)).hex()


def has_keyframe(run, k):
    return set(STATE_KINDS) <= set(run.kinds(k))


def start_over_parent(run, layout, step):
    """A branch's first state that is stored as what differs from the parent's."""
    lineage = run.header["lineage"]
    for k, outcome in states(run.parent(), lineage["position"], lineage["position"], Files()):
        check(outcome.state is not None, f"the parent's state {k}: {outcome.text}")
        check_same("lineage: state", lineage["state"], outcome.digest)
        for shard, table in outcome.layout.tables.items():
            check_same(f"parent: pieces of shard {shard}", layout.tables.get(shard, table), table)
            layout.tables[shard] = table
        return {kind: outcome.state[kind] | step.get("partial_" + kind, {}) for kind in STATE_KINDS}


class Outcome:
    """How position k was got, or why it was not. `state` is None where it was not."""

    def __init__(self, how, text, layout, state=None, state_digest=None):
        self.how, self.text, self.layout = how, text, layout
        self.state, self.digest, self.wrong = state, state_digest, how == "MISMATCH"


def rebuild(run, k, layout, state, files):
    """One position; `state` is RUN@(k-1) or None."""
    kinds = run.kinds(k)
    if not kinds:
        return Outcome("none", "keeps no files", layout)
    index, step = read_step(run, k, layout, files)
    rebuilt = []
    if has_keyframe(run, k):
        rebuilt.append(("keyframe", {kind: step[kind] for kind in STATE_KINDS}))
    if "g" in kinds and state is not None:
        rebuilt.append(("journal", walk(layout, index, step, state)))
    elif k == run.first and not has_keyframe(run, k):
        rebuilt.append(("partial", start_over_parent(run, layout, step)))
    if not rebuilt:
        return Outcome("none", "the state before it is not known", layout)
    for how, found in rebuilt:
        got = state_digest(layout, index, found)
        check_same(f"state, from the {how}", run.positions[k]["state"], got)
    how = "+".join(how for how, _ in rebuilt)
    return Outcome(how, f"state {got}", layout, rebuilt[0][1], got)


def states(run, first, last, files):
    """Yields (k, Outcome) for first..last, beginning at the last keyframe that they need."""
    start = max((k for k in run.positions if k <= first and has_keyframe(run, k)),
                default=run.first)
    layout, state = Layout(), None
    for k in range(start, last + 1):
        try:
            outcome = rebuild(run, k, layout, state, files)
        except Damage as damage:
            outcome = Outcome("MISMATCH", str(damage), layout)
        except (OSError, KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            outcome = Outcome("MISMATCH", f"{type(error).__name__}: {error}", layout)
        state = outcome.state
        if k >= first or outcome.wrong:
            yield k, outcome


def positions_of(text, run):
    first, last = min(run.positions), max(run.positions)
    if text is None:
        return first, last
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if not match or not first <= int(match[1]) <= int(match[2]) <= last:
        sys.exit(f"--positions: expected A..B within {first}..{last}, got {text}")
    return int(match[1]), int(match[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run")
    parser.add_argument("--positions", metavar="A..B", help="all by default")
    flags = parser.parse_args()
    np.seterr(all="ignore")  # Inf and NaN are states like others
    try:
        run = Run(flags.run)
        check(run.positions, "ledger: no start line")
    except (Damage, OSError, KeyError, ValueError, TypeError) as error:
        print(f"{flags.run}: {type(error).__name__}: {error}")
        return 1
    first, last = positions_of(flags.positions, run)
    files, ways, wrong = Files(), {}, 0
    for k, outcome in states(run, first, last, files):
        print(f"{k:>9}  {outcome.how:<16} {outcome.text}")
        wrong += outcome.wrong
        ways[outcome.how] = ways.get(outcome.how, 0) + (outcome.state is not None)
    found = ", ".join(f"{count} by {how}" for how, count in sorted(ways.items()) if count)
    print(f"ledger: {len(run.lines)} lines{', a torn one after them' if run.torn else ''}; "
          f"files: {files.count}, {files.bytes} bytes, {files.pieces} pieces; "
          f"states rebuilt: {found or 'none'}; mismatches: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
