"""The program of an srun that starts nothing, for tests of sweeps."""

import sys

# It writes what bench would have written, or does what the file "mode" says.
SRUN = f"""#!{sys.executable}
import json, pathlib, sys, time
folder = pathlib.Path(__file__).parent
words = sys.argv[1:]
n = next(int(w.partition("=")[2]) for w in words if w.startswith("--ntasks="))
name = words[words.index("bench") + 1]
with (folder / "calls").open("a") as calls:
    calls.write(f"{{name}} {{n}}\\n")
mode = (folder / "mode").read_text().split() if (folder / "mode").exists() else []
if f"{{name}}-{{n}}-fails" in mode:
    print("some noise")
    print("blinkmpi: error: rank 1: no luck; try again", file=sys.stderr)
    print("srun: error: node01: task 1: Exited with exit code 2", file=sys.stderr)
    sys.exit(2)
if f"{{name}}-{{n}}-hangs" in mode:
    time.sleep(60)
rows = []
for size in (1024, 4096):
    row = {{"size": size, "type": "float", "redop": "sum", "root": -1, "experiment_name": f"{{name}}_float_sum"}}
    row["blinkmpi"] = {{"scheme": "direct", "executor": "c"}}
    for place in ("out_of_place", "in_place"):
        row[place] = {{"time": size / 100 * n, "bus_bw": 8.0 / n, "alg_bw": 4.0, "nwrong": 0}}
        times = {{"min": size / 100, "max": size / 50, "median": size / 80}}
        mpi = {{"time": size / 50 * n, "ratio": 2.0, "nwrong": 0, "times_us": times}}
        row["blinkmpi"][place] = {{"times_us": times, "compare": {{"mpi": mpi}}}}
    rows.append(row)
world = 1 if "worlds" in mode else n
facts = {{"ranks": world, "compare": ["mpi"], "commit": "0" * 40, "date": "2026-11-21T12:00"}}
document = {{"config": {{"graph": 0}}, "results": rows, "blinkmpi": facts}}
path = words[words.index("-J") + 1]
pathlib.Path(path).write_text(json.dumps(document))
if "worlds" in mode:
    pathlib.Path(path + ".0").write_text("{{}}")
"""
