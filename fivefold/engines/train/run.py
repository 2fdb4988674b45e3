"""`run(config, folder)`: everything between the command line and the loop, in order."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch.distributed as dist

from fivefold.axes.apply import apply
from fivefold.core.config import RunConfig
from fivefold.core.errors import DataError, TrainingError
from fivefold.engines.train.check import check_run
from fivefold.engines.train.checkpoint.checkpointer import Checkpointer
from fivefold.engines.train.data.corpus import Corpus, Split
from fivefold.engines.train.data.loader import Loader
from fivefold.engines.train.data.prepare import prepare
from fivefold.engines.train.data.tokenizer import resolve_tokenizer
from fivefold.engines.train.model_source import (
    check_vocabulary,
    first_values,
    model_tokenizer,
)
from fivefold.engines.train.process import Process, seed_everything, start_process
from fivefold.engines.train.recorder import Recorder
from fivefold.engines.train.run_directory import RunDirectory
from fivefold.engines.train.stop import StopRequest
from fivefold.engines.train.trainer import Trainer
from fivefold.kernels.dispatch import set_deterministic
from fivefold.model.decoder import Decoder
from fivefold.model.objective import Objective
from fivefold.weights.model_files import write_model_files


def run(config: RunConfig, folder: Path) -> None:
    """Train, or go on training, the run in `folder`. Returns when it is done or was stopped.

    Raises a FivefoldError for everything a user can mend: before any work where possible.
    """
    directory = RunDirectory(folder)
    with start_process(config.layout) as process, ExitStack() as held:
        process.on_main(lambda: _claim(directory, config, held))
        _train(config, process, directory)


def _claim(directory: RunDirectory, config: RunConfig, held: ExitStack) -> None:
    directory.make()
    held.enter_context(directory.locked())
    directory.claim(config)


def _train(config: RunConfig, process: Process, directory: RunDirectory) -> None:
    seed_everything(config.train.seed, process.ranks.rank, config.train.deterministic)
    set_deterministic(config.train.kernels == "deterministic")
    with StopRequest() as stop:
        trainer = build_trainer(config, process, directory)
        resumed = trainer.resume_or_start()
        with trainer.recorder.running(trainer.position.step, resumed):
            finished = trainer.run(stop)
        if not finished:
            raise TrainingError(
                f"stopped by a signal after step {trainer.position.step}, all saved",
                "the same command resumes it",
            )


def build_trainer(config: RunConfig, process: Process, directory: RunDirectory) -> Trainer:
    """Assemble data, model, axis and records. Cheap checks come before slow work."""
    model_config = check_run(config)
    tokenizer = resolve_tokenizer(config.data, model_tokenizer(config.model), _cache(config))
    check_vocabulary(tokenizer, model_config)
    values = first_values(config.model, model_config, config.train.seed)
    corpus = prepare(config.data, tokenizer, progress=process.ranks.is_main)
    _check_same_data(process, corpus)
    objective = Objective(
        Decoder(model_config, device="meta"),
        z_loss=config.train.z_loss,
        chunk=config.train.loss_chunk,
    )
    model = apply(
        objective,
        layout=config.layout,
        mesh=process.mesh,
        precision=config.precision,
        recompute=config.train.recompute,
        recompute_every=config.train.recompute_every,
        compile=config.train.compile,
        sequence_length=config.data.sequence_length,
        moe=config.moe,
        communication=config.communication,
        device=process.device,
    )
    checkpointer = Checkpointer(
        directory.checkpoints,
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
        model_files=partial(write_model_files, config=model_config, tokenizer=tokenizer),
        layout=str(config.layout),
    )
    recorder = Recorder(config, model_config, process, directory)
    train = _loader(corpus, config, process, "train")
    held_out = (
        _loader(corpus, config, process, "evaluate") if config.data.evaluation_share else None
    )
    return Trainer(config, process, model, values, train, held_out, checkpointer, recorder)


def _check_same_data(process: Process, corpus: Corpus) -> None:
    """Raise DataError, on every rank, where some rank reads other data than rank 0."""
    if process.mesh is None:
        return
    found: list[str] = [""] * process.ranks.world_size
    dist.all_gather_object(found, corpus.fingerprint)
    strange = [rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]]
    if strange:
        raise DataError(
            f"rank {strange[0]} reads other documents or another tokenizer than rank 0",
            "give every machine the same files, best on a file system that all share",
        )


def _loader(corpus: Corpus, config: RunConfig, process: Process, split: Split) -> Loader:
    return Loader(
        corpus,
        split=split,
        sequence_length=config.data.sequence_length,
        packing=config.data.packing,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        micro_batch=config.train.micro_batch,
        dp_rank=process.data_rank[0],
        dp_size=process.data_rank[1],
    )


def _cache(config: RunConfig) -> Path | None:
    return None if config.data.cache is None else Path(config.data.cache)
