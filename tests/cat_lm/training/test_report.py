"""The lines of a run's log."""

from __future__ import annotations

from types import SimpleNamespace

from cat_lm.config import load_config
from cat_lm.training.report import Report
from tests.conftest import REPOSITORY


def test_line_averages_speed_and_waiting_over_the_steps_since_the_last_line():
    keys = ["data.path=nowhere", "train.global_batch_size=4", "train.micro_batch_size=4"]
    config = load_config(REPOSITORY / "configs/quickstart.yaml", keys)
    report = Report.__new__(Report)
    report.config, report.ranks = config, SimpleNamespace(world_size=2)
    report.flops, report.peak, report.auxiliary_name = 1e3, 1e6, "none"
    report._mean_seconds, report._since = None, (0, 0.0, 0.0)
    result = SimpleNamespace(loss=1.0, grad_norm=1.0, auxiliary=None, skipped=False)
    tokens = config.tokens_per_step
    report.line(report.record(1, result, 1e-3, 9.0, 90.0))  # of step 1 only
    for step, (waited, seconds) in enumerate([(0.0, 1.0), (0.5, 2.0), (0.0, 5.0)], 2):
        record = report.record(step, result, 1e-3, waited, seconds)
        assert record["tokens_per_second"] == tokens / seconds
    line = report.line(record)
    rate = 3 * tokens / 8
    assert f" {rate:,.0f} tokens/s, MFU {rate * 1e3 / 2e6:.1%}, data 6.2%" in line


def test_loss_that_a_callback_adds_alone_has_no_line():
    results = {"val_loss": 2.0, "val_perplexity": 7.389, "val_bits_per_byte": 1.5}
    (line,) = Report.__new__(Report).validation_lines(4, results | {"val_loss/mine": 1.0})
    assert line == "step 4: validation loss 2.0000, perplexity 7.39, 1.5000 bits per byte"
