"""benchmarks/training/fsdp.py on CPU ranks, and what it makes of turns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.training import fsdp
from tests.harness import ROOT, long_but

pytest.importorskip("torch.distributed.fsdp", reason="torch 2.6 and newer have FSDP2")

SECONDS = 120.0


@pytest.mark.slow
@pytest.mark.parametrize("words", long_but(["--ctas 0 8"], ["--ctas 0 8", "--ddp --reduce float32 --gates 4"]))
def test_copies_on_all_groups_are_trained_alike(words: str, tmp_path: Path) -> None:
    to = tmp_path / "fsdp.json"
    start = [str(Path(sys.prefix, "bin", "torchrun")), "--standalone", "--nproc-per-node", "2"]
    program = [str(ROOT / "benchmarks" / "training" / "fsdp.py"), "--repeats", "6", "-o", str(to), *words.split()]
    done = subprocess.run([*start, *program], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    # its exit status says nothing: at exit a rank may die in a thread of gloo's, which outlives Python
    assert to.exists(), done.stdout + done.stderr
    found = json.loads(to.read_text())
    (row,) = found["results"]
    told = {name: (one.get("gate_from"), one.get("max_ctas")) for name, one in row["libraries"].items()}
    if "--ddp" in words:
        assert told == {"gloo": (None, None), "blink": (None, None), "blink, gate from 4 MiB": (4 << 20, None)}
        assert (row["how"], row["reduce"]) == ("ddp", "float32")
    else:
        gates = {None: "blink", 1 << 20: "blink, gate from 1 MiB", 8 << 20: "blink, gate from 8 MiB"}
        ours = {f"{name}{', 8 CTAs' if few else ''}": (gate, 8 if few else None)
                for few in (False, True) for gate, name in gates.items()}  # fmt: skip
        assert told == {"gloo": (None, None), **ours}
        assert (row["how"], row["reduce"]) == ("fully_shard", "bfloat16")
    for one in row["libraries"].values():
        assert len(one["turns_ms"]) == len(one["wall_turns_ms"]) == 6
        assert one["ratio"]["low"] <= one["ratio"]["median"] <= one["ratio"]["high"]
        assert one["losses_apart"] < 1e-3
        assert one["last_loss"] < one["first_loss"]
        assert one["kernels_ms"]["products"] > 0
    assert row["libraries"]["gloo"]["ratio"]["median"] == 1
    assert row["parameters"] > 100_000
    assert not found["failed"]
    assert found["blinkmpi"]["ranks"] == 2
    assert found["blinkmpi"]["memory"] == "host"


def test_kernels_by_their_names() -> None:
    assert {fsdp.kind_of(name) for name in ("stages", "direct", "ncclDevKernel_AllGather_RING_LL(...)")} == {
        "communication"
    }
    assert fsdp.kind_of("gate") == "gates"
    assert fsdp.kind_of("nvjet_tst_192x192_64x4_1x2_h_bz_coopA_NNT") == "products"
    assert fsdp.kind_of("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128>") == "products"
    assert fsdp.kind_of("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>") == "attention"
    assert fsdp.kind_of("void at::native::vectorized_gather_kernel<16, long>") == "other"
    assert fsdp.kind_of("aggregate") == "other"


def test_few_turns_have_no_interval() -> None:
    assert fsdp.interval([2.0, 1.0, 3.0]) == {"median": 2.0, "low": None, "high": None}
    found = fsdp.interval([1.0 + i / 100 for i in range(21)])
    assert found["median"] == pytest.approx(1.1)
    assert found["low"] == pytest.approx(1.05)
    assert found["high"] == pytest.approx(1.15)


def test_losses_that_part() -> None:
    assert fsdp.apart([2.0, 4.0], [2.0, 3.0]) == 0.25


def test_sizes_of_models() -> None:
    small, large = fsdp.parsed([]), fsdp.parsed(["--gpu", "--width", "2048"])
    assert (small.width, small.steps, small.batch) == (64, 1, 2)
    assert (large.width, large.depth, large.steps) == (2048, 22, 3)
