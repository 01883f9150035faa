"""Reads a step's files as an h5py user would and compares with the tensors that were written.

usage: read_master.py MASTER EXPECTED
EXPECTED holds KIND/TENSOR.f32 (raw little-endian) for every tensor that MASTER must show.
"""
import json
import pathlib
import sys

import h5py
import hdf5plugin  # noqa: F401  registers the zstd filter
import numpy as np


def check_master(master, expected):
    """Whole tensors under their HF names, through the virtual datasets."""
    wanted = sorted(str(p.relative_to(expected).with_suffix("")) for p in expected.glob("*/*.f32"))
    with h5py.File(master, "r") as file:
        shown = sorted(f"{kind}/{name}" for kind in file if kind != "index" for name in file[kind])
        assert shown == wanted, (shown, wanted)
        for path in wanted:
            tensor = file[path][...]
            assert tensor.dtype == np.float32
            raw = np.fromfile(expected / (path + ".f32"), dtype="<f4")
            assert tensor.tobytes() == raw.tobytes(), path
        return json.loads(bytes(file["index"][...]))


def columns_of(master):
    with h5py.File(master, "r") as file:
        return {(kind, name): file[kind][name].shape[-1]
                for kind in file if kind != "index" for name in file[kind]}


def check_rank_files(steps, index, columns, expected):
    """The same pieces, cut from the slabs by the table in each rank file."""
    for info in index["files"]:
        with h5py.File(steps / info["name"], "r") as file:
            own = json.loads(bytes(file["index"][...]))
            for slab in own["slabs"]:
                values, offset = file[slab["dataset"]][...], 0
                for piece in slab["pieces"]:
                    name, r0, r1, c0, c1 = own["shards"][str(slab["shard"])][piece]
                    cut = values[offset : offset + (r1 - r0) * (c1 - c0)].reshape(r1 - r0, c1 - c0)
                    offset += cut.size
                    whole = np.fromfile(expected / slab["kind"] / (name + ".f32"), dtype="<f4")
                    whole = whole.reshape(-1, columns[slab["kind"], name])
                    assert cut.tobytes() == whole[r0:r1, c0:c1].tobytes(), (name, slab)
                assert offset == values.size


def check_missing_source(master, copy):
    """A master without its rank files shows NaN, never stale or zero numbers."""
    copy.mkdir()
    (copy / master.name).write_bytes(master.read_bytes())
    with h5py.File(copy / master.name, "r") as file:
        for kind in file:
            if kind != "index":
                assert all(np.isnan(file[kind][name][...]).all() for name in file[kind])


MASTER, EXPECTED = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
INDEX = check_master(MASTER, EXPECTED)
check_rank_files(MASTER.parent, INDEX, columns_of(MASTER), EXPECTED)
check_missing_source(MASTER, EXPECTED / "alone")
print(f"{len(INDEX['files'])} rank files, h5py {h5py.__version__}: equal")
