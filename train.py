"""Pretrain a model: `python train.py CONFIG.yaml [section.key=value ...]`.

The program is the same for one process and for the ranks of torchrun, deepspeed or srun.
"""

import cat_lm  # noqa: F401 -- must be first: it removes the working directory from the path

# isort: split
import argparse
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm import __version__, architectures
from cat_lm.callbacks import Run
from cat_lm.config import RunConfig, load_config
from cat_lm.config.loading import ShowKeys
from cat_lm.config.run import check_replaceable
from cat_lm.core.cli import Parser, announce, whole
from cat_lm.core.errors import SharedError, command, hard_exit
from cat_lm.core.folders import check_output
from cat_lm.core.numbers import RANKS
from cat_lm.data.opening import open_data
from cat_lm.training import launcher
from cat_lm.training.checkpoint.files import candidates
from cat_lm.training.launcher import find_launcher
from cat_lm.training.metrics import Metrics, RunLog, check_writes, write_error
from cat_lm.training.watchdog import StopSignal, Watchdog
from eval.zero_shot import callback  # noqa: F401 -- registers the tasks of validation.tasks

if TYPE_CHECKING:
    from cat_lm.data.loader import Batch
    from cat_lm.training.engine import LaunchedStep, StepResult


@command
def main() -> None:
    parser = Parser(
        prog="train.py",
        description="Pretrain a language model of any registered architecture under DeepSpeed.",
        epilog="Start several ranks with torchrun, deepspeed or srun and the same arguments. Exit "
        "codes: 0 finished; 2 invalid input or a full disk; 75 stopped with a checkpoint after a "
        "signal (TERM, USR1, HUP without nohup) or the end of its launcher, or ended by a "
        "transient error (not all ranks joined, a file system or a network failed): start it "
        "again with train.resume=auto; 76 hung (train.hang_minutes); 130 stopped after Ctrl-C.",
    )
    parser.add_argument("config", help="YAML file; configs/quickstart.yaml is an example")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="values of configuration keys, which replace those of the file; the last one wins",
    )
    parser.add_argument(
        "--keys",
        nargs="?",
        const=architectures.DEFAULT,
        action=ShowKeys,
        metavar="ARCHITECTURE",
        help="print every configuration key with its default and meaning, for this "
        f"model.architecture (default: {architectures.DEFAULT}), and exit",
    )
    # DeepSpeed's launcher passes it; the environment has the same value.
    parser.add_argument(
        "--local_rank", "--local-rank", type=whole(RANKS.at_least(0)), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    # Threads that wait by spinning slow down the working ones if cores are shared, so that steps
    # take several times as long. Set it before torch is imported, possibly by a plugin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Expandable segments of GPU memory avoid fragmentation when shapes change, as between training
    # and validation. torch reads either variable when it is imported.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    stop, started_by = StopSignal(), find_launcher()
    config = load_config(arguments.config, arguments.overrides)
    # With a single process, validate folder, data and resume path before the slow imports. With
    # several ranks, the preflight checks them on all ranks together.
    if launcher.world_size() == 1:
        check_output(config.train.output_dir, "train.output_dir")
        if config.train.resume not in ("auto", "never"):
            candidates(config.train.resume)
    announce(f"{config.train.output_dir}: starting the run of {arguments.config}")
    if launcher.world_size() == 1:
        open_data(config)

    watchdog = Watchdog(config.train.hang_minutes, started_by)
    # Import torch only now, so that --help and errors in the configuration appear at once.
    from cat_lm.ops.runtime.cpu import flush_denormals
    from cat_lm.training import distributed

    flush_denormals()
    timeout = distributed.collective_timeout(config.train.hang_minutes)
    with watchdog.ending_orphans(), distributed.start(timeout) as ranks:
        exit_code = Trainer(config, ranks, stop, watchdog).run()
    watchdog.close()
    hard_exit(exit_code)


class Trainer:
    """One run: everything that it needs, and the loop over its steps."""

    def __init__(self, config: RunConfig, ranks, stop: StopSignal, watchdog: Watchdog) -> None:
        from cat_lm.training import preflight
        from cat_lm.training.building import describe_groups, make_deterministic, resolve_precision
        from cat_lm.training.checkpoint.run import Checkpoints
        from cat_lm.training.events import Callbacks
        from cat_lm.training.report import Report
        from cat_lm.training.validation import Validation

        self.ranks, self.stop, self.watchdog = ranks, stop, watchdog
        if config.train.deterministic:
            make_deterministic()
        precision, reason = ranks.broadcast(resolve_precision(config, ranks.device))
        config = config.with_precision(precision)
        folder = Path(config.train.output_dir)
        ranks.on_rank_zero(lambda: check_replaceable(folder / "config.yaml"))
        # Raise all problems of hosts, data, folder, batch and memory on all ranks together.
        config, checked = preflight.check(config, ranks, watchdog.progress)
        self.config = config
        watchdog.progress("the preflight")
        # One rank per host has checked all shards, so that this rank opens them when it reads them.
        opened = ranks.on_all_ranks(lambda: open_data(config, look=False))
        self.corpus, held_out, self.loader = opened

        # Open the run's folder and choose the checkpoint to resume.
        self.log = ranks.on_rank_zero(lambda: RunLog(folder / "train.log")) or RunLog(None)
        self.checkpoints = Checkpoints(folder, config, ranks, self.log.line, watchdog.progress)
        start_from = self.checkpoints.find_checkpoint_to_resume()
        watchdog.progress("choosing the checkpoint")
        self.log.line(f"cat_lm {__version__}, {precision} ({reason}), {ranks.describe()}")
        self.log.line("\n".join(checked))

        try:
            self._build_engine(start_from)
            groups = self.engine.optimizer.param_groups
            self.log.line(describe_groups(config.optimizer.name, groups))
            past = self.checkpoints.recorded_step
            what = (config, folder, ranks, self.engine, self.corpus, watchdog, past)
            self.callbacks = Callbacks(Run(*what, self.log.line, self.record, self.must_stop))
            if start_from is not None:
                self.callbacks.restore(start_from)
        except BaseException:
            self.checkpoints.close()  # Release the lock of the run's folder.
            raise
        self.validation = Validation(held_out, self.engine, ranks, watchdog)

        # Open the files that are written during the run.
        self.metrics = ranks.on_rank_zero(lambda: Metrics(folder, past, self.log.line))
        self.validated_step = ranks.broadcast(self.metrics and self.metrics.validated_step)
        ranks.on_rank_zero(lambda: config.save(folder / "config.yaml"))
        self.report = Report(config, self.engine.model, ranks)
        # On a GPU the numbers of a step are read while the next one is computed.
        self.reads_late = ranks.device.type == "cuda"
        self.launched: list[tuple[int, float, float, LaunchedStep | None, LaunchedStep]] = []
        self.votes = (0.0, 0.0)
        self.log.line(self.report.plan(self.loader))

    def _build_engine(self, start_from: Path | None) -> None:
        """Build model and optimizer, and restore them from the checkpoint `start_from`, if any."""
        from cat_lm.pretrained.record import comparing_files
        from cat_lm.training.building import (
            build_model,
            choose_document_attention,
            describe_backend,
            load_initial_weights,
            vocab_size,
        )
        from cat_lm.training.engine import Engine

        config, ranks = self.config, self.ranks
        # One rank per host checks the files of an initial model.
        skip = ranks.local_rank != 0 or not config.train.init_checksums
        with comparing_files(skip):
            vocabulary = ranks.on_all_ranks(lambda: vocab_size(config, self.corpus, start_from))
        model = build_model(config, vocabulary, weights=ranks.is_first)
        place = (config, model.config, ranks.device)
        self.log.line(f"convolution: {describe_backend(*place, 'conv_backend')}")
        if recurrence := describe_backend(*place, "mixer_backend"):
            self.log.line(f"recurrence: {recurrence}")
        if apart := choose_document_attention(config, model, ranks.device):
            self.log.line(f"documents: {apart.name}, {apart.reason}")
        if config.train.init_from is not None and start_from is None:
            with comparing_files(skip):
                starts = ranks.on_rank_zero(
                    lambda: load_initial_weights(model, config.train.init_from)
                )
            new = f"; new: {', '.join(starts)}" if starts else ""
            self.log.line(f"weights: from {config.train.init_from}{new}")
        self.engine = Engine(model, config, ranks)
        self.step = self.skipped = self.skipped_in_a_row = 0
        self.was_validated = True
        if start_from is not None:
            found = self.checkpoints.load(start_from, self.engine, self.corpus.fingerprint)
            self.step, self.skipped = found.state.step, found.state.skipped
            self.skipped_in_a_row = found.state.skipped_in_a_row
            self.was_validated = found.state.validated
            self.log.line("\n".join([f"continuing from {found.folder}", *found.changed]))

    def run(self) -> int:
        """Train to the last step, or until a signal; return the exit code."""
        from cat_lm.training import preflight

        config, last_step = self.config, self.config.total_steps
        if self.step >= last_step:
            self.check_last_step()
        # A run that was stopped by a signal has skipped its validation, which is made now.
        is_left = not self.was_validated and self.validated_step != self.step
        if self.step >= last_step and not is_left:
            self.log.line(f"nothing to do: already at step {self.step} of {last_step}")
            return self.close(0)
        self.stop.catch_interrupts()
        # Before any training, a batch of the largest shape finds a lack of memory, and two batches
        # of validation data find errors in these.
        self.log.line(preflight.dry_run_batch(self.engine, self.loader))
        self.watchdog.progress("the dry-run batch")
        self.validation.run(max_batches=2)
        exit_code = 0
        self.callbacks.launch(self.step)
        self.watchdog.begin_steps(self.stop)
        if is_left and (exit_code := self.validate()):
            self.log.line(f"stopped by a signal at step {self.step}")
            return self.close(exit_code)
        for batch, waited in self.batches():
            self.train_step(batch, waited)
            is_last = self.step == last_step
            if write_error(self.metrics, self.log) or self.callbacks.error:
                self.stop.request()  # All ranks end in `save`.
            exit_code = 0 if is_last else self.agreed_exit_code()
            if self.is_validation_due() and not exit_code:
                exit_code = self.validate()
            is_due = self.step % config.checkpoint.every_steps == 0 and self.has_changed()
            if is_due or is_last or exit_code:
                with self.watchdog.allow_slow_work():
                    self.save()
            if exit_code:
                self.log.line(f"stopped by a signal after step {self.step}")
                break
        else:
            self.check_last_step()
            self.log.line(f"finished: {self.step} steps in {config.train.output_dir}")
        return self.close(exit_code)

    def close(self, exit_code: int) -> int:
        with self.watchdog.allow_slow_work():
            self.callbacks.end(self.step, exit_code)
            if self.metrics:
                self.metrics.close()
            self.log.close()
            self.checkpoints.close()
            self.ranks.on_rank_zero(lambda: check_writes(self.metrics, self.log))
            self.callbacks.check(self.checkpoints.describe_left)
        return exit_code

    def batches(self) -> Iterator[tuple["Batch", float]]:
        """Yield this rank's batches of the remaining steps, each with the seconds of waiting."""
        place = self.ranks.share(self.config.train.sequence_parallel)
        remaining = (self.step, self.config.total_steps)
        with (
            closing(self.loader.prefetch(*remaining, *place)) as batches,
            self.report.progress_bar(*remaining) as self.bar,
        ):
            start = time.perf_counter()
            for batch in batches:
                yield batch, time.perf_counter() - start
                self.bar.update()
                start = time.perf_counter()

    def train_step(self, batch: "Batch", waited: float) -> None:
        """Launch one optimizer step, and record it or, on a GPU, the previous one."""
        from cat_lm.training.schedule import learning_rate

        config = self.config
        # If the previous step was not waited for, this one begins when that ends.
        after = self.launched[-1][-1] if self.launched else None
        self.step += 1
        lr = learning_rate(config, self.step)
        launched = self.engine.launch_step(batch, lr, self.stop.votes())
        self.launched.append((self.step, lr, waited, after, launched))
        # A validation, a checkpoint or the end needs the numbers of all steps before it.
        rests = (config.validation.every_steps, config.checkpoint.every_steps, config.total_steps)
        is_rest = any(self.step % every == 0 for every in rests)
        is_rest = is_rest or self.callbacks.wait_for(self.step)
        self.record_launched(leave=1 if self.reads_late and not is_rest else 0)
        self.callbacks.step(self.step)

    def record_launched(self, leave: int = 0) -> None:
        """Record the launched steps but the newest `leave`; too many skipped ones end the run."""
        while len(self.launched) > leave:
            step, lr, waited, after, launched = self.launched.pop(0)
            result = launched.result()
            self.votes = result.flags
            seconds = launched.seconds(after) + (waited if after is None else 0.0)
            record = self.report.record(step, result, lr, waited, seconds)
            self.watchdog.progress(f"step {step}")
            self.record(record)
            self.bar.set_postfix_str(f"loss {result.loss:.3f}")
            every = self.config.train.log_every_steps
            if step % every == 0 or step in (1, self.config.total_steps):
                self.log.line(self.report.line(record))
            self.count_skipped(step, result)

    def record(self, record: dict[str, Any]) -> None:
        """Write the numbers of a step or a validation, and pass them to the callbacks."""
        if self.metrics:
            self.metrics.write(record)
        self.callbacks.record(record)

    def count_skipped(self, step: int, result: "StepResult") -> None:
        if not result.skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.log.line(
            f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, "
            f"step skipped ({self.skipped} so far, {self.skipped_in_a_row} in a row)"
        )
        if self.skipped_in_a_row >= self.config.train.max_skipped_steps:
            raise SharedError(
                f"{self.skipped_in_a_row} steps in a row were not finite "
                f"(train.max_skipped_steps); {self.checkpoints.describe_left()}; a lower "
                "optimizer.lr may help"
            )

    def has_changed(self) -> bool:
        """Return True if any step since the newest checkpoint updated the weights."""
        return self.skipped_in_a_row < self.step - (self.checkpoints.newest_step or 0)

    def check_last_step(self) -> None:
        """Raise SharedError if the last step was skipped: the run is then not finished."""
        if self.skipped_in_a_row:
            raise SharedError(
                f"step {self.step}, the last one, was skipped ({self.skipped_in_a_row} in a row): "
                f"loss or gradient was not finite; the run is not finished; "
                f"{self.checkpoints.describe_left()}; a lower optimizer.lr may help"
            )

    def is_validation_due(self) -> bool:
        """Return True if a validation is due after this step."""
        every, last_step = self.config.validation.every_steps, self.config.total_steps
        return self.step > 0 and (self.step % every == 0 or self.step == last_step)

    def agreed_exit_code(self) -> int:
        """Return the exit code all ranks agreed on in the last step (0: keep training)."""
        return self.stop.agreed_exit_code(self.votes, alone=self.ranks.world_size == 1)

    def must_stop(self) -> bool:
        """Return True if the ranks vote to stop, between two steps (a collective)."""
        self.votes = tuple(self.ranks.sum(*self.stop.votes()))
        return bool(self.agreed_exit_code())

    def validate(self) -> int:
        """Validate and record the results; return the exit code of an earlier signal, or 0."""
        result = self.validation.run(must_stop=self.must_stop)
        if result is None:
            return self.agreed_exit_code()
        self.callbacks.validation(self.step, result)
        if self.callbacks.has_shared and (exit_code := self.agreed_exit_code()):
            return exit_code  # The results of a callback may be missing.
        for line in self.report.validation_lines(self.step, result):
            self.log.line(line)
        tokens = self.step * self.config.tokens_per_step
        self.record({"step": self.step, "tokens": tokens, **result})
        self.validated_step = self.step
        return 0

    def save(self) -> None:
        self.record_launched()
        if self.metrics:
            self.metrics.sync()  # A checkpoint must not be ahead of the records.
        self.ranks.on_rank_zero(lambda: check_writes(self.metrics, self.log, before_saving=True))
        state = {
            "step": self.step,
            "tokens": self.step * self.config.tokens_per_step,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "validated": not self.is_validation_due() or self.validated_step == self.step,
            "data": {"path": self.config.data.path, "fingerprint": self.corpus.fingerprint},
        }
        # After skipped steps, keep the older checkpoints.
        prune, tokenizer = not self.skipped_in_a_row, self.corpus.folder / "tokenizer"
        states = self.callbacks.states
        folder = self.checkpoints.save(self.engine, state, tokenizer, prune=prune, callbacks=states)
        self.watchdog.progress(f"the checkpoint of step {self.step}")
        self.log.line(f"step {self.step}: checkpoint {folder}")
        self.callbacks.checkpoint(self.step, folder)
        self.ranks.on_rank_zero(lambda: check_writes(self.metrics, self.log))
        self.callbacks.check(self.checkpoints.describe_left)


if __name__ == "__main__":
    main()
