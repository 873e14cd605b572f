"""Errors of the Hub that callers catch."""

from __future__ import annotations

import socket

import pytest
from huggingface_hub import HfApi

from cat_lm.core.hub import explain_gated_access


def test_a_hub_that_does_not_answer_is_an_error_of_the_system(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.socket() as reserved:  # Nothing listens there.
        reserved.bind(("127.0.0.1", 0))
        hub = HfApi(endpoint=f"http://127.0.0.1:{reserved.getsockname()[1]}")
        with pytest.raises(OSError), explain_gated_access("some/model", "model"):
            hub.repo_info("some/model")
