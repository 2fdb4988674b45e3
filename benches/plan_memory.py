"""The planner's memory beside the dry run's, and beside what a real step on this machine takes.

    python benches/plan_memory.py [--real] [--large] [--json]

Every row is one rank of one layout: bytes of activations and buffers at the fullest moment, planned and
executed on fake tensors (states are equal to the byte, or the row says so). `--large` adds Llama-3.1-405B and
DeepSeek-V3, minutes each. `--real` trains a small model for a step in a process of its own and compares the
growth of its resident memory, at its peak, with the whole ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fivefold.core.config import RunConfig
from fivefold.core.layout import Layout, parse_assignments
from fivefold.core.resolve import build as configuration
from fivefold.engines.train.check import check_run
from fivefold.engines.train.dry_run.run import dry_run, one_of_each_stage
from fivefold.plan.memory.ledger import Ledger, ledger
from fivefold.plan.shape import ModelShape
from fivefold.plan.software import FIVEFOLD
from fivefold.plan.workload import Strategy, Training

RECIPES = Path(__file__).resolve().parents[1] / "fivefold" / "recipes"
DENSE = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
SPARSE = {
    "model_type": "deepseek_v3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "moe_intermediate_size": 128, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
LAYOUTS = {
    "dense": [
        "", "dp_shard=4,zero=1", "dp_shard=4,zero=2", "dp_shard=4", "tp=4",
        "tp=4,sequence_parallel=false", "cp=4", "cp=4,cp_kind=gather", "cp=4,ulysses=2",
        "cp=2,tp=2", "pp=4", "pp=2,schedule=gpipe", "pp=2,schedule=zb-h1", "pp=2,schedule=zbv",
        "pp=2,schedule=dualpipe", "pp=2,schedule=dualpipe-v",
        "pp=4,schedule=interleaved,virtual=2", "pp=2,dp_shard=2,tp=2",
    ],
    "sparse": ["", "dp_shard=4,ep=2", "tp=2,dp_shard=2,ep=4,zero=1", "pp=2,dp_shard=2,ep=2"],
}  # fmt: skip
LARGE = {
    "llama3.1-405b": ["tp=8,pp=16,dp_shard=128", "tp=8,pp=16,dp_shard=128,zero=1"],
    "deepseek-v3": ["pp=16,dp_shard=128,ep=64"],
}
REAL = {**DENSE, "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408}


@dataclass(frozen=True)
class Row:
    """One rank: planned and executed bytes beside the state; whether the state is equal."""

    what: str
    rank: int
    states: bool
    planned: int
    executed: int

    @property
    def error(self) -> float:
        """Of the plan."""
        return self.planned / self.executed - 1


def small() -> Iterator[Row]:
    """Every axis, with each recomputation mode that changes something for it."""
    for model, layouts in LAYOUTS.items():
        for layout in layouts:
            for recompute in ("none", "full") if model == "dense" else ("none",):
                values = {
                    "model": {"config": DENSE if model == "dense" else SPARSE},
                    "layout": parse_assignments(layout),
                    "train": {"micro_batch": 2, "loss_chunk": 64, "recompute": recompute},
                    "data": {"sequence_length": 256},
                    "precision": {"dtype": "bf16"},
                }
                yield from rows(f"{model} {layout} recompute={recompute}", values, 4)


def large() -> Iterator[Row]:
    """Recipes as they are, with 32 micro-batches a data rank at most."""
    for recipe, layouts in LARGE.items():
        values = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"))
        for layout in layouts:
            values["layout"] = Layout.parse(layout).model_dump(exclude_defaults=True)
            yield from rows(f"{recipe} {layout}", values, 32, first=True)


def rows(what: str, values: dict[str, Any], count: int, *, first: bool = False) -> Iterator[Row]:
    """One rank of each stage, or of the first alone."""
    layout = Layout(**values["layout"])
    values["train"]["global_batch"] = count * layout.dp * values["train"].get("micro_batch", 1)
    config = configuration(values)
    planned = plan(config)
    ranks = one_of_each_stage(config.layout)[: 1 if first else None]
    for one, account in zip(planned, dry_run(config, ranks), strict=False):
        held = account.memory
        equal = one.states == held.parameters + held.masters + held.gradients + held.optimizer
        inputs = 0 if layout.cp > 1 else one.activations["inputs"]
        yield Row(what, one.rank, equal, one.working - inputs, held.activations)


def plan(config: RunConfig) -> tuple[Ledger, ...]:
    """The ledgers of a training configuration."""
    train = config.train
    return ledger(
        ModelShape("model", check_run(config)),
        Training(config.data.sequence_length, train.global_batch, compute=config.precision.dtype),
        Strategy(config.layout, train.micro_batch, train.recompute),
        replace(FIVEFOLD, chunk=train.loss_chunk),
    )


def real_config(recompute: str, model: dict[str, Any] = REAL) -> RunConfig:
    """40 million parameters and 4,096 tokens at a time, in fp32."""
    return configuration({
        "model": {"config": model},
        "train": {"micro_batch": 8, "global_batch": 16, "recompute": recompute},
        "data": {"sequence_length": 512},
    })  # fmt: skip


def resident_growth(recompute: str) -> None:
    """In a process of its own: bytes that a step adds to its resident memory, at the peak.

    A step of a tiny model comes first: libraries load and make room for themselves.
    """
    import gc
    import resource

    from fivefold.observe.memory import resident_bytes

    step(real_config(recompute, {**DENSE, "hidden_size": 64, "intermediate_size": 128}))
    gc.collect()
    before = resident_bytes()
    step(real_config(recompute))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def step(config: RunConfig) -> None:
    """Build a model with values and train it for one step."""
    import torch

    from fivefold.core.environment import Ranks
    from fivefold.engines.train.data.batch import Batch
    from fivefold.engines.train.dry_run.run import build
    from fivefold.engines.train.process import Process

    process = Process(Ranks(0, 1, 0, 1, 0), torch.device("cpu"), None)
    built = build(config, check_run(config), process, torch.device("meta"))
    for part in built.model.masters().values():
        part.values.normal_(0.0, 0.02)
    shape = (config.train.micro_batch, config.data.sequence_length)
    rows = torch.zeros(shape, dtype=torch.int64)
    count = config.train.global_batch // config.train.micro_batch
    built.step([Batch(rows, rows, rows, None)] * count, 1e-3)


# glibc keeps freed memory for later; told so, it gives pieces of tensors' sizes back at once.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def real() -> Iterator[Row]:
    """The whole ledger, less what it reserves, beside the growth of a process."""
    for recompute in ("none", "full"):
        (planned,) = plan(real_config(recompute))
        child = [sys.executable, __file__, "--child", recompute]
        done = subprocess.run(
            child, check=True, capture_output=True, text=True, env={**os.environ, **GIVE_BACK}
        )
        grown = int(done.stdout)
        what = f"a real step on this machine, recompute={recompute}"
        yield Row(what, 0, True, planned.states + planned.working, grown)


def main() -> None:
    """Print rows as they come, then the mean and the worst."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=("none", "full"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        resident_growth(options.child)
        return
    found: list[Row] = []
    sources = [real()] if options.real else [small(), *([large()] if options.large else [])]
    for source in sources:
        for row in source:
            found.append(row)
            if options.json:
                print(json.dumps({**asdict(row), "error": row.error}), flush=True)
                continue
            states = "" if row.states else "  STATES DIFFER"
            print(
                f"{row.what:<58} rank {row.rank:<3} planned {row.planned:>14,} "
                f"executed {row.executed:>14,} {row.error:+7.2%}{states}",
                flush=True,
            )
    errors = [abs(row.error) for row in found]
    if not options.json:
        print(f"{len(errors)} rows: mean {sum(errors) / len(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
