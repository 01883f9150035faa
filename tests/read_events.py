"""Reads event files with the tensorboard package: prints {run: {tag: [[step, value], ...]}} as JSON."""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer  # noqa: E402

multiplexer = EventMultiplexer(size_guidance={"scalars": 0, "tensors": 0})
multiplexer.AddRunsFromDirectory(sys.argv[1])
multiplexer.Reload()
runs = {}
for run, kinds in multiplexer.Runs().items():
    values = {tag: [[e.step, e.value] for e in multiplexer.Scalars(run, tag)] for tag in kinds["scalars"]}
    runs[run] = values
json.dump(runs, sys.stdout)
