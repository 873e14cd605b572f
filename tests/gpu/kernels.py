"""The Triton kernels of the short run, compiled for Hopper or looked up where there is no GPU.

`python -m tests.gpu.kernels FOLDER` compiles them into FOLDER, for `run.sh --cache FOLDER`. What is
launched is found by running tests and models on a GPU that is not there (`tests.unit.fake_gpu`).
Triton's keys hold the versions of Triton, Python and ptxas: these must be the GPU machine's.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).with_name("short_tests.txt")
# They compute what no fake tensor can; their kernels are few, or those of other tests.
UNCACHED = ("test_engine_cuda", "test_landmark_cuda", "test_long_filter", "captured_in_a_graph")


class Found:
    """Kernels by their names and signatures: whether the cache had them."""

    def __init__(self) -> None:
        self.hits: dict[str, bool] = {}
        self.failed: list[str] = []

    def note(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        """Take what Triton tells of a kernel that it has loaded or compiled."""
        self.hits.setdefault(f"{src.name} {src.hash()}", cache_hit)

    def __str__(self) -> str:
        return f"{sum(self.hits.values())} of {len(self.hits)} kernels are in the cache"


class _Pointer:
    """A tensor's, as far as Triton specializes on it."""

    def __init__(self, tensor: Any) -> None:
        self.dtype, self._offset = tensor.dtype, tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        """Return an address with the alignment that torch's allocator gives."""
        return self._offset


class _Hopper:
    """Triton's driver of a GPU that is not there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Ended(Exception):
    """A test has launched its kernels."""


class _Absent(Exception):
    """A kernel is not in the cache."""


def find(compile_them: bool) -> Found:
    """Run what the short run launches; compile its kernels, or only look for them.

    What fails on a GPU that is not there, as reading a number must, is over with its kernels known.
    """
    import torch
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    found = Found()

    def launched(kernel: Any, given: dict[str, Any]) -> None:
        given = {k: _Pointer(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        with contextlib.suppress(_Absent):
            kernel.run(grid=(1,), warmup=True, **given)

    def refuse(backend: Any, stages: dict, options: Any, *_: Any) -> None:
        raise _Absent

    def note_absent(make: Callable, source: Any, *given: Any, **named: Any) -> Any:
        try:
            return make(source, *given, **named)
        except _Absent:
            found.note(src=source, cache_hit=False)
            raise

    # A fake tensor of torch without CUDA says that it is none of CUDA's.
    serves = mock.patch("cat_lm.ops.loss.linear_cross_entropy._kernel_serves", lambda *_: True)
    triton.runtime.driver.set_active(_Hopper())
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(serves)
        enter(mock.patch.object(triton.knobs.compilation, "listener", found.note))
        if not compile_them:
            enter(mock.patch.object(CUDABackend, "add_stages", refuse))
            compile_ = triton.compiler.compile
            enter(mock.patch("triton.compiler.compile", partial(note_absent, compile_)))
        with mock.patch.object(torch.cuda, "is_available", lambda: True):  # none is skipped
            _run_tests(launched, found)
        for work in _models():
            try:
                work(launched)
            except Exception as error:
                found.failed.append(f"{work}: {type(error).__name__}: {error}"[:300])
    return found


def chosen_tests() -> list[str]:
    """Return the tests of the short run."""
    lines = TESTS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _run_tests(launched: Callable, found: Found) -> None:
    import pytest
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException

    from tests.unit.fake_gpu import fake_gpu

    ran = []

    class OnFakeGpu:
        @pytest.hookimpl(wrapper=True)
        def pytest_pyfunc_call(self, pyfuncitem: Any) -> Iterator[None]:
            home = pyfuncitem.module
            ran.append(pyfuncitem.name)
            with fake_gpu(launched), contextlib.ExitStack() as stack:
                stack.enter_context(mock.patch.object(torch, "equal", lambda *_: True))
                stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda x: x))
                if hasattr(home, "definition"):  # which is no kernel of ours, and slow
                    stack.enter_context(mock.patch.object(home, "definition", end))
                try:
                    yield
                except Exception as error:
                    if not isinstance(error, (_Ended, DataDependentOutputException)):
                        found.failed.append(f"{pyfuncitem.name}: {error}"[:300])
            return True

    def end(*_: Any) -> None:
        raise _Ended

    names = [name for name in chosen_tests() if not any(part in name for part in UNCACHED)]
    options = ("-q", "-o", "minversion=7", "-p", "no:cacheprovider")
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = pytest.main([*options, *names], plugins=[OnFakeGpu()])
    if code != 0 or len(ran) < len(names):
        found.failed.append(f"the tests did not run: {told.getvalue()[-1000:]}")


def _models() -> Iterator[Callable]:
    """Yield what launches the kernels of models, of convolutions alone, and of decoding."""
    for name, width, heads, vocabulary in (
        ("cat", 1024, 16, 32_000),
        ("pythia", 1024, 16, 32_000),
        ("cat", 2048, 16, 50_304),
        ("cat", 4096, 32, 50_432),
    ):
        yield partial(_train, name, width, heads, vocabulary)
    yield partial(_decode, "cat")
    for kind, window in (("head", 21), ("depthwise", 4)):
        yield partial(_convolve, kind, window)


def _model(name: str, width: int, heads: int, vocabulary: int) -> Any:
    """Make a model of one layer without memory."""
    import torch

    from eval.speed.models import ModelSize, build

    size = ModelSize(1, width, heads, vocabulary, 21, "bfloat16", "meta")
    with torch.device("meta"):
        return build(size, name, 2048)


def _train(name: str, width: int, heads: int, vocabulary: int, launched: Callable) -> None:
    import torch

    from tests.unit.fake_gpu import fake_gpu, on_fake_gpu

    model = _model(name, width, heads, vocabulary).train()
    with fake_gpu(launched):
        on_fake_gpu(model, torch.bfloat16)
        ids = torch.empty(8, 2048, dtype=torch.int64)
        model(input_ids=ids, labels=ids, skip_logits=True).loss.backward()


def _decode(name: str, launched: Callable) -> None:
    import torch

    from tests.unit.fake_gpu import fake_gpu, on_fake_gpu

    model = _model(name, 1024, 16, 32_000).eval()
    with fake_gpu(launched), torch.no_grad():
        on_fake_gpu(model, torch.bfloat16)
        cache = None
        for length in (2048, 1):
            ids = torch.empty(1, length, dtype=torch.int64)
            cache = model(ids, past_key_values=cache, use_cache=True).past_key_values


def _convolve(kind: str, window: int, launched: Callable) -> None:
    import torch

    from cat_lm import ops
    from cat_lm.ops.convolution import kinds
    from tests.unit.fake_gpu import fake_gpu

    with fake_gpu(launched):
        half = {"dtype": torch.bfloat16, "requires_grad": True}
        x = torch.empty(8, 2048, 16, 64, **half)
        filters = torch.empty(kinds.get(kind).filter_shape(16, 64, window), **half)
        y = ops.convolve(kind, x, filters, backend="triton")
        torch.autograd.grad(y, (x, filters), torch.empty_like(y))


def relocate(folder: Path) -> None:
    """Let a cache that was copied find its files, whose whole paths it has written down."""
    for group in folder.glob("*/__grp__*.json"):
        paths = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
        paths = {name: str(group.parent / name) for name in paths}
        group.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    if sys.argv[2:] == ["relocate"]:
        relocate(folder)
        return
    os.environ |= {"TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
    found = find(compile_them=True)
    print("\n".join(found.failed), file=sys.stderr)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {len(found.hits)} kernels, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
