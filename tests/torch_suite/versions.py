"""Run tests/torch with other versions of torch, each in an environment of its own, and write down how that ended.

    python -m tests.torch_suite.versions 2.4.1 2.11.0 2.15.0 -o benchmarks/results/torch-versions.json

Environments stay beside ``.venv``. PyPI's torch comes with CUDA (several GB each), which the tests need not have.
"""

import argparse
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import jobs  # noqa: E402

SECONDS = 1800  # for the tests of a version
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def environment(version: str) -> Path:
    """The Python of an environment with this torch and what the tests need."""
    folder = f".venv-torch-{version}"
    variables = f"VENV={folder}", f"TORCH=torch=={version}", "TORCH_INDEX=https://pypi.org/simple"
    subprocess.run(["make", *variables, f"{folder}/.has-test"], cwd=ROOT, check=True)
    return ROOT / folder / "bin" / "python"


def tested(version: str) -> dict[str, Any]:
    """How the tests of tests/torch ended."""
    python = environment(version)
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/torch"]
    found = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, timeout=SECONDS, check=False,
                           capture_output=True, text=True)  # fmt: skip
    lines = found.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    counts = {name: int(count) for count, name in COUNT.findall(lines[-1] if lines else "")}
    print(f"torch {version}: {lines[-1] if lines else found.stderr[-500:]}", *failed, sep="\n", flush=True)
    return {"torch": version, "counts": counts, "failed": [jobs.meta.without_folders(line) for line in failed],
            "status": found.returncode}  # fmt: skip


def main() -> int:
    """Test each version; 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("-o", "--output", help="write the result as JSON under this name, or one beside it if taken")
    options = parser.parse_args()
    began = datetime.now().astimezone()
    rows = [tested(version) for version in options.versions]
    if options.output:
        jobs.write(options.output, jobs.document({"torch_versions": options.versions}, rows, [], began))
    return int(any(row["status"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
