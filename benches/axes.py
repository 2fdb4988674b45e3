"""What each axis costs in software: the same training step in one process and divided over ranks.

    python benches/axes.py                       # every axis at 2 and 4 ranks, eager
    python benches/axes.py --compile --rounds 3  # also with train.compile, which takes minutes more
    python benches/axes.py --only tp=2 cp=2 --json

One process has two threads, two ranks have one thread each, and four ranks share the two cores: the
work and the cores are the same, so a ratio above 1 is communication, bookkeeping and work done twice.
Each round times one step of one process and then one of the ranks, which sleep meanwhile. Bytes are
those that all ranks together hand to others in one step (an all-reduce counted as a ring's), beside
what the formulae of docs/axes say.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import socket
import statistics
import time
import traceback
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

SHAPE = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    **SHAPE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 352, "norm_topk_prob": True,
}  # fmt: skip
BATCH, MICRO_BATCH = 8, 2
DENSE = [
    "tp=2", "tp=2,sequence_parallel=false", "cp=2,zero=1", "pp=2", "dp_shard=2,zero=1",
    "dp_shard=2,zero=3",
    "tp=4", "cp=4,zero=1", "pp=4", "dp_shard=4,zero=1", "dp_shard=4,zero=3", "pp=2,tp=2",
]  # fmt: skip
SPARSE = ["dp_shard=2,ep=2,zero=1", "dp_shard=4,ep=4,zero=1"]


class Traffic(TorchDispatchMode):
    """Bytes that this rank hands to others, by kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        if name in ("send",):
            self.sent["send"] += first.nbytes
        elif name in ("allreduce_", "all_reduce"):
            ways = _ways(args)
            self.sent["all-reduce"] += 2 * first.nbytes * (ways - 1) // ways
        elif name in ("_allgather_base_", "all_gather_into_tensor"):
            mine = args[1] if name.startswith("_") else first
            self.sent["all-gather"] += mine.nbytes * (_ways(args) - 1)
        elif name in ("_reduce_scatter_base_", "reduce_scatter_tensor"):
            whole, ways = args[1] if name.startswith("_") else first, _ways(args)
            self.sent["reduce-scatter"] += whole.nbytes * (ways - 1) // ways
        elif name == "all_to_all_single":
            group = _group(args)
            leaving = args[2] or [1] * dist.get_world_size(group)
            kept = leaving[dist.get_rank(group)]
            self.sent["all-to-all"] += first.nbytes * (sum(leaving) - kept) // max(sum(leaving), 1)
        elif name not in ("recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier"):
            raise NotImplementedError(f"bytes of {name}")


def _group(args: Any) -> dist.ProcessGroup:
    """Of a collective: c10d's operators have the group itself, functional ones its name."""
    for value in args[1:]:
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
    return dist.distributed_c10d._resolve_process_group(args[-1])


def _ways(args: Any) -> int:
    return dist.get_world_size(_group(args))


class Side:
    """A training step of this rank."""

    def __init__(self, layout: str, shape: dict[str, Any], compiled: bool, length: int) -> None:
        from fivefold.axes.apply import apply
        from fivefold.axes.mesh import build_mesh
        from fivefold.core.config import OptimizerSection, PrecisionSection
        from fivefold.core.layout import Layout
        from fivefold.engines.train.data.batch import Batch
        from fivefold.engines.train.optimizer import MasterOptimizer
        from fivefold.engines.train.step import TrainStep
        from fivefold.model.decoder import Decoder
        from fivefold.model.families import parse_config
        from fivefold.model.objective import Objective

        torch._dynamo.reset()
        decoder = Decoder(parse_config(shape))
        decoder.initialize(0)
        chosen = Layout.parse(layout)
        mesh = build_mesh(chosen, "cpu") if chosen.world_size > 1 else None
        model = apply(
            Objective(decoder), layout=chosen, mesh=mesh, precision=PrecisionSection(),
            compile=compiled, sequence_length=length,
        )  # fmt: skip
        optimizer = MasterOptimizer(model.masters(), model.gradients, OptimizerSection())
        self._step = TrainStep(model, optimizer, None, 1.0, torch.device("cpu"))
        rank, ranks = mesh.place(("dp_replicate", "dp_shard")) if mesh else (0, 1)
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(0, shape["vocab_size"], (BATCH, length + 1), generator=generator)
        mine = text.chunk(ranks)[rank].split(MICRO_BATCH)
        positions = torch.arange(length).expand(MICRO_BATCH, -1).contiguous()
        self._batches = [
            Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions, None)
            for rows in mine
        ]

    def seconds(self) -> float:
        """Of one step, from when all ranks are ready."""
        if dist.is_initialized():
            dist.barrier()
        started = time.perf_counter()
        self._step(self._batches, 3e-4)
        return time.perf_counter() - started

    def traffic(self) -> dict[str, int]:
        """Bytes of one step by kind."""
        with Traffic() as traffic:
            self._step(self._batches, 3e-4)
        return dict(traffic.sent)


def serve(rank: int, ranks: int, port: int, pipe: Any) -> None:
    """One rank: builds sides and runs what it is told until the pipe closes."""
    torch.set_num_threads(2 if ranks == 1 else 1)
    if ranks > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    side: Side | None = None
    while True:
        try:
            word, *values = pipe.recv()
        except EOFError:
            return
        try:
            if word == "build":
                side = None
                side = Side(*values)
                pipe.send((True, None))
            else:
                pipe.send((True, getattr(side, word)()))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            pipe.send((False, (reason, traceback.format_exc())))


class Ranks:
    """Processes that run sides together."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self._pipes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(rank, count, port, theirs), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)

    def ask(self, *words: Any) -> list[Any]:
        """Every rank's answer. Raises RuntimeError with the first rank's reason."""
        for pipe in self._pipes:
            pipe.send(words)
        answers = [pipe.recv() for pipe in self._pipes]
        for fine, value in answers:
            if not fine:
                raise RuntimeError(value[0], value[1])
        return [value for _, value in answers]


def wanted_bytes(layout: str, shape: dict[str, Any], length: int) -> float:
    """What docs/axes say all ranks together send in one step, in fp32; without the few scalars."""
    from fivefold.core.layout import Layout
    from fivefold.model.decoder import Decoder
    from fivefold.model.families import parse_config

    chosen, config = Layout.parse(layout), parse_config(shape)
    named = dict(Decoder(config, device="meta").named_parameters())
    dense = sum(p.numel() for n, p in named.items() if ".experts." not in n)
    blocks = sum(p.numel() for n, p in named.items() if n.startswith("layers."))
    width, layers, tokens = config.hidden_size, config.num_layers, BATCH * length
    ranks, tp, cp, pp = chosen.world_size, chosen.tp, chosen.cp, chosen.pp
    total = 0.0
    if tp > 1:  # each pipeline's stages share the layers, so that all layers count once
        activations = (8 * layers + 4) * tokens * width * 4
        softmax = 2 * 3 * tokens * 4
        norms = 2 * 4 * (2 * layers + 1) * width if chosen.sequence_parallel else 0
        total += (tp - 1) * (activations + softmax + norms)
    if cp > 1:  # keys and values forward; again with fp32 gradients backward
        keys = tokens // cp * config.num_kv_heads * 2 * config.head_dim
        total += cp * layers * (cp - 1) * keys * (4 + 4 + 4)
    if pp > 1:
        total += 2 * (pp - 1) * tokens * width * 4
    if chosen.shards > 1 and chosen.zero == 1:
        total += 4 * dense * (2 + 1) * (chosen.shards - 1)
    if chosen.shards > 1 and chosen.zero == 3:  # what is outside blocks is gathered once
        passes = BATCH // chosen.dp // MICRO_BATCH
        total += passes * 4 * (2 * blocks + (dense - blocks) + dense) * (chosen.shards - 1)
    if chosen.ep > 1 and config.moe is not None:  # with even load
        elsewhere = tokens * config.moe.top_k * (chosen.ep - 1) / chosen.ep
        passes = BATCH // chosen.dp // MICRO_BATCH
        counts = 8 * config.moe.experts * (chosen.ep - 1) / chosen.ep * ranks * passes
        total += layers * (4 * elsewhere * width * 4 + counts)
    return total


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each layout, eager and (if asked) compiled."""
    from fivefold.core.layout import Layout

    rows = []
    teams = {1: Ranks(1)}
    for shape, layouts in ((SHAPE, DENSE), (EXPERTS, SPARSE)):
        for compiled in (False, True)[: 1 + arguments.compile]:
            chosen = [x for x in layouts if not arguments.only or x in arguments.only]
            if not chosen:
                continue
            words = (shape, compiled, arguments.sequence)
            try:
                warm(teams[1], "", *words)
            except RuntimeError as error:
                rows.append({"layout": "one process", "compiled": compiled, "fails": error.args[0]})
                continue
            for layout in chosen:
                row: dict[str, Any] = {"layout": layout, "compiled": compiled}
                ranks = Layout.parse(layout).world_size
                team = teams[ranks] = teams.get(ranks) or Ranks(ranks)
                try:
                    warm(team, layout, *words)
                    row |= compare(teams[1], team, arguments.rounds)
                    if not compiled:
                        row |= bytes_moved(team, layout, shape, arguments.sequence)
                except RuntimeError as error:
                    row["fails"] = error.args[0]
                    del teams[ranks]  # they may wait for each other for ever: others take over
                rows.append(row)
                if not arguments.json:
                    print(line(row), flush=True)
    return rows


def warm(team: Ranks, layout: str, *words: Any) -> None:
    """Build and take two steps: the second finds all buffers made."""
    team.ask("build", layout, *words)
    team.ask("seconds")
    team.ask("seconds")


def compare(alone: Ranks, team: Ranks, rounds: int) -> dict[str, Any]:
    """Seconds of both, and the ratio of each round."""
    ours, theirs = [], []
    for index in range(rounds):
        for side in (0, 1) if index % 2 else (1, 0):
            if side:
                theirs.append(max(team.ask("seconds")))
            else:
                ours.append(max(alone.ask("seconds")))
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        "alone_seconds": statistics.median(ours),
        "alone_spread": [min(ours), max(ours)],
        "seconds": statistics.median(theirs),
        "spread": [min(theirs), max(theirs)],
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
    }


def bytes_moved(team: Ranks, layout: str, shape: dict[str, Any], length: int) -> dict[str, Any]:
    """Counted over all ranks in one step, and by formula."""
    kinds: Counter[str] = Counter()
    for sent in team.ask("traffic"):
        kinds.update(sent)
    wanted = wanted_bytes(layout, shape, length)
    return {"bytes": dict(kinds), "bytes_total": kinds.total(), "bytes_formula": round(wanted)}


def line(row: dict[str, Any]) -> str:
    name = f"  {row['layout']:<30}{'compiled' if row['compiled'] else 'eager':<10}"
    if "fails" in row:
        return f"{name}fails: {row['fails']}"
    low, high = row["ratio_spread"]
    text = f"{name}{row['ratio']:5.2f}x ({low:.2f}-{high:.2f})  {row['seconds'] * 1e3:6.0f} ms"
    text += f" (alone {row['alone_seconds'] * 1e3:.0f})"
    if "bytes_total" in row:
        share = row["bytes_total"] / row["bytes_formula"] if row["bytes_formula"] else math.nan
        text += f"  {row['bytes_total'] / 2**20:7.1f} MiB sent, {share:.3f} of the formula"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="LAYOUT")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="also with train.compile")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    what = f"{BATCH} x {arguments.sequence} tokens a step, micro-batches of {MICRO_BATCH}, fp32"
    if not arguments.json:
        print(f"{what}; step of the ranks over that of one process with 2 threads")
    rows = measure(arguments)
    if arguments.json:
        print(json.dumps({"what": what, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
