"""The Triton kernels compile for GPUs that are not there: H100/H200, A100, L40S and MI300.

The interpreter runs the kernels as Python and knows nothing of types that must agree in branches
and loops, nor of what a matrix instruction or shared memory takes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess

import pytest
import torch

from cat_lm.ops.convolution import triton as backend
from cat_lm.ops.convolution.kinds import KERNEL_NUMBERS
from tests.unit.sass import disassemble, hazards

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
# (backend, architecture, threads of a warp), and what its multiprocessor lets a program have.
HOPPER, AMPERE, ADA = ("cuda", 90, 32), ("cuda", 80, 32), ("cuda", 89, 32)
MI300 = ("hip", "gfx942", 64)
SHARED_MEMORY = {HOPPER: 232448, AMPERE: 166912, ADA: 101376, MI300: 65536}


OTHERS = [pytest.param(gpu, marks=pytest.mark.long) for gpu in (AMPERE, ADA, MI300)]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Nothing that an earlier run compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(kernel, target, pointers: dict, constants: dict, options: dict, floats: tuple = ()):
    """A kernel with pointers of the given element types, and 16 dividing what it specializes on.

    All but the vocabulary, which may be odd. For Hopper its machine code is read, too, up to the
    widest window of the fused rotation: beyond it one backward kernel, right on an H100, has two
    restored descriptors.
    """
    from cat_lm.ops.convolution.triton import launch

    result = built(kernel, target, pointers, constants, options, floats)
    assert result.metadata.shared <= SHARED_MEMORY[target]
    window = getattr(constants.get("TILE"), "window", constants.get("WINDOW", 0))
    if target == HOPPER and window <= launch.WIDEST_FUSED_ROTATION:
        # See test_ops_triton_sass.py.
        assert "wgmma" not in result.asm["ptx"] or not hazards(disassemble(result.asm["cubin"]))
    return result


def built(kernel, target, pointers: dict, constants: dict, options: dict, floats: tuple = ()):
    """The same, whatever memory it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = constants.get(name, pointers.get(name))
        if name in constants or (name in pointers and value is None):
            signature[name], constexprs[(index,)] = "constexpr", value
            continue
        signature[name] = f"*{value}" if name in pointers else "fp32" if name in floats else "i32"
        if name in floats:
            continue
        if not kernel.params[index].do_not_specialize and name != "vocabulary":
            attributes[(index,)] = [["tt.divisibility", 16]]
    if target[0] == "hip":
        options = {key: value for key, value in options.items() if key != "maxnreg"}
    source = ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return compile(source, target=GPUTarget(*target), options=options)


def registers_and_stack(result, folder) -> tuple[int, int]:
    """Registers of a thread, and the bytes that did not fit into them, as ptxas has left them."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(result.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", told).groups())


@contextlib.contextmanager
def memory_of(target):
    """What asks the device for its shared memory is told that of `target`."""
    from cat_lm.ops.convolution.triton import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "shared_memory", lambda device: SHARED_MEMORY[target])
        yield


def options_of(target, dtype: torch.dtype, window: int, streams: int = 1, **how):
    """What a convolution's kernels are compiled for, and how."""
    from cat_lm.ops.convolution.triton.launch import choose_launch

    lead = (1, 2048, 16, 3) if streams == 3 else (1, 2048, 16)
    x = torch.empty(*lead, 64, dtype=dtype, device="meta")
    with memory_of(target):
        options = choose_launch(x, window, **how).options()
    return {"TILE": options.pop("TILE")}, options


def convolutions(target, dtype: torch.dtype, window: int, filters: tuple, **how) -> tuple:
    """The forward and the backward kernel of packed streams, or of one; filters: True or None."""
    from cat_lm.ops.convolution.triton.backward import backward_kernel
    from cat_lm.ops.convolution.triton.forward import forward_kernel

    element = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    streams, made = len(filters), []
    rest = {"positions_ptr": "i32" if how.get("documents") else None}
    rest |= dict.fromkeys(("cos_ptr", "sin_ptr"), element if how.get("rotary") else None)
    given = dict(zip("qkv", [element if f else None for f in filters], strict=False))
    rest |= {f"{stream}_filter_ptr": given.get(stream) for stream in "qkv"}
    rest |= {"x_ptr": element, "bias_ptr": element, "dx_ptr": element}
    rest |= {"df_ptr": "fp32", "dbias_ptr": "fp32"}
    for kernel, prefix in ((forward_kernel, ""), (backward_kernel, "d")):
        pointers = {
            f"{prefix}{s}_ptr": element if i < streams else None for i, s in enumerate("qkv")
        }
        backward = kernel is backward_kernel
        constants, options = options_of(target, dtype, window, streams, backward=backward, **how)
        made.append(compiled(kernel, target, rest | pointers, constants, options))
    return tuple(made)


@pytest.mark.parametrize(
    ("target", "dtype", "window", "per_channel", "documents", "rotary"),
    [
        # Llama's, of which all channels are rotated.
        (HOPPER, torch.bfloat16, 21, False, False, 64),
        (HOPPER, torch.bfloat16, 21, False, True, 64),
        (HOPPER, torch.bfloat16, 21, True, True, 16),
        (HOPPER, torch.bfloat16, 128, False, True, 0),
        (HOPPER, torch.float32, 21, False, True, 0),
        pytest.param(HOPPER, torch.bfloat16, 21, False, False, 0, marks=pytest.mark.long),
        pytest.param(AMPERE, torch.bfloat16, 128, True, False, 0, marks=pytest.mark.long),
        pytest.param(AMPERE, torch.float16, 1, False, False, 0, marks=pytest.mark.long),
        pytest.param(ADA, torch.bfloat16, 64, False, False, 16, marks=pytest.mark.long),
        pytest.param(MI300, torch.bfloat16, 21, False, True, 64, marks=pytest.mark.long),
    ],
)
def test_one_stream(target, dtype, window, per_channel, documents, rotary, tmp_path):
    """On Hopper nothing is spilled in half precision."""
    how = {"per_channel": per_channel, "documents": documents, "rotary": rotary}
    forward, backward = convolutions(target, dtype, window, (True,), **how)
    if target == HOPPER and dtype != torch.float32:
        assert all(registers_and_stack(made, tmp_path)[1] == 0 for made in (forward, backward))
    if target == HOPPER and dtype != torch.float32 and not per_channel:
        # Matrix instructions of the whole warp group, and rows read 16 bytes at a time: through
        # asynchronous copies where the compiler pipelines, otherwise into registers.
        assert "wgmma.mma_async" in forward.asm["ptx"]
        assert re.search(r"cp\.async\.cg|ld\.global\S*\.v4\.b32", forward.asm["ptx"])


ALL = (True, True, True)


@pytest.mark.parametrize("target", OTHERS)
def test_packed_streams(target):
    """With all filters, which takes the most; streams without one compile for Hopper below."""
    convolutions(target, torch.bfloat16, 21, ALL, rotary=16)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("rotary", "documents", "filters"),
    [
        pytest.param(16, False, ALL, marks=LONG),
        (0, True, ALL),
        (16, True, (None, None, True)),
        pytest.param(0, False, ALL, marks=LONG),
        pytest.param(16, True, ALL, marks=LONG),
        pytest.param(64, False, ALL, marks=LONG),
    ],
)
def test_packed_streams_fit_into_registers(rotary, documents, filters, tmp_path):
    """At W = 21 on Hopper nothing is spilled, and two programs share a multiprocessor.

    But for both gradients and documents, which take one.
    """
    how = {"rotary": rotary, "documents": documents}
    forward, backward = convolutions(HOPPER, torch.bfloat16, 21, filters, **how)
    for kernel in (forward, backward):
        registers, spilled = registers_and_stack(kernel, tmp_path)
        assert spilled == 0
        if kernel is forward or not documents:
            programs = 65536 // (registers * 32 * kernel.metadata.num_warps)
            assert programs >= 2 and SHARED_MEMORY[HOPPER] // kernel.metadata.shared >= 2
        # All warps work: in a chain of products, those beyond the fourth repeat the others' part.
        eight_in_a_row = r"nvidia_mma<\{[^}]*warpsPerCTA = \[8, 1\]"
        assert not re.search(eight_in_a_row, kernel.asm["ttgir"])
    if rotary == 16 and filters[0]:
        # Partners' products: 16 columns, or 8 for each of two warp groups.
        assert f"m64n{8 if documents else 16}k16" in forward.asm["ptx"]


def test_a_long_halo_has_a_loop_of_its_own(tmp_path):
    """Sums of 128 by 64 lags beside all else would not fit into a thread's 255 registers."""
    _, backward = convolutions(HOPPER, torch.bfloat16, 128, (None, None, True))
    assert registers_and_stack(backward, tmp_path)[1] == 0


def test_rotation(tmp_path):
    """The channels of Pythia's heads that are rotated, and the others, 16 bytes at a time."""
    from cat_lm.ops.convolution.triton.rotation import rotate_kernel, turn_of

    pointers = dict.fromkeys(("x_ptr", "y_ptr", "cos_ptr", "sin_ptr"), "bf16")
    for in_place in (False, True):
        constants = {"TURN": turn_of(16, 64, in_place)}
        made = compiled(rotate_kernel, HOPPER, pointers, constants, {"num_warps": 4})
        assert registers_and_stack(made, tmp_path)[1] == 0
        assert re.search(r"ld\.global\S*\.v4\.b32", made.asm["ptx"])


@pytest.mark.parametrize(
    ("target", "element", "positions"),
    [
        (HOPPER, "bf16", None),
        (HOPPER, "bf16", "i32"),
        (HOPPER, "fp32", "i32"),
        *(
            pytest.param(gpu, element, "i32", marks=pytest.mark.long)
            for gpu in (ADA, MI300)
            for element in ("bf16", "fp32")
        ),
    ],
)
def test_multihead(target, element, positions):
    from cat_lm.ops.convolution.triton import multihead

    x = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16 if element == "bf16" else torch.float32)
    for reverse in (False, True):
        with memory_of(target):
            options = multihead.mix_options(x, 21, documents=positions is not None)
        pointers = dict.fromkeys(("x_ptr", "f_ptr", "y_ptr"), element)
        pointers |= {"bias_ptr": None if reverse else element, "positions_ptr": positions}
        constants = {"MIX": options.pop("MIX"), "REVERSED": reverse}
        compiled(multihead.mix_kernel, target, pointers, constants, options)
    with memory_of(target):
        options = multihead.filter_options(x, 21)
    pointers = {"dy_ptr": element, "x_ptr": element, "df_ptr": "fp32", "positions_ptr": positions}
    constants = {"MIX": options.pop("MIX")}
    compiled(multihead.mix_filters_kernel, target, pointers, constants, options)


def kernels_of_convolutions():
    """Every kernel with its constants, for fp32 heads of 64 channels and W = 4."""
    from cat_lm.ops.convolution.triton import backward, decode, forward, multihead, rotation

    x = torch.empty(1, 1, 1, 64)
    for streams, per_channel in ((1, False), (1, True), (3, False)):
        how = {"per_channel": per_channel, "rotary": 16}
        constants, options = options_of(HOPPER, x.dtype, 4, streams, **how)
        yield forward.forward_kernel, constants, options
        yield backward.backward_kernel, constants, options
    yield rotation.rotate_kernel, {"TURN": rotation.turn_of(16, 64, False)}, {}
    for reverse in (False, True):
        constants = {"MIX": multihead.mix_options(x, 4, documents=True)["MIX"]}
        yield multihead.mix_kernel, constants | {"REVERSED": reverse}, {}
    constants = {"MIX": multihead.filter_options(x, 4)["MIX"]}
    yield multihead.mix_filters_kernel, constants, {}
    for kind in KERNEL_NUMBERS.values():
        yield decode.decode_kernel, {"STEP": decode.step_of(64, 4, 16, kind, True)}, {}


def test_arguments_of_one():
    """Triton makes constants of them, plain numbers that are no tensors: one head, for one."""
    for kernel, constants, options in kernels_of_convolutions():
        pointers = {name: "fp32" for name in kernel.arg_names if name.endswith("_ptr")}
        if "positions_ptr" in pointers:
            pointers["positions_ptr"] = "i32"
        free = [p.name for p in kernel.params if not p.do_not_specialize and not p.is_constexpr]
        ones = {name: 1 for name in free if name not in pointers}
        assert len(ones) >= 5
        built(kernel, HOPPER, pointers, constants | ones, options)


@pytest.mark.parametrize("target", [HOPPER, *OTHERS])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_cross_entropy(target, element, tmp_path):
    from cat_lm.ops.loss.cross_entropy_triton import cross_entropy_kernel, launch_options

    options = launch_options(50257, warp=target[2])
    constants = {"IGNORED": -100, "BLOCK": options.pop("BLOCK"), "WANTS_GRADIENT": True}
    pointers = {"logits_ptr": element, "labels_ptr": "i64", "losses_ptr": "fp32"}
    result = compiled(cross_entropy_kernel, target, pointers, constants, options)
    assert options["num_warps"] * target[2] == 1024
    if target == HOPPER:
        # Two programs of 1,024 threads on a multiprocessor, whose rows the cache holds, and
        # accesses of 16 bytes whatever the vocabulary.
        registers, spilled = registers_and_stack(result, tmp_path)
        assert registers <= 32 and spilled == 0
        ptx = result.asm["ptx"]
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


# H, K, V, which are constants to the compiler where they are 1; sizes of the rate; of a.
SCANS = {
    "mamba's": ((1, 16, 128), (1, 128), (1, 16, 128)),
    "gla's": ((4, 16, 32), (16, 1), (1, 1, 1)),
    "many keys": ((2, 512, 64), (512, 64), (2, 512, 64)),
    "one number": ((1, 1, 1), (1, 1), (1, 1, 1)),
}


@pytest.mark.parametrize("target", [HOPPER, *OTHERS])
@pytest.mark.parametrize("kind", SCANS)
def test_scan_of_recall(kind, target):
    from cat_lm.ops.recurrence import decaying_scan_triton as _scan_triton

    (heads, keys, values), rate, a = SCANS[kind]
    q, v = (torch.empty(1, 1, 1, heads, n, device="meta") for n in (keys, values))
    rate, a = q.new_empty(1, 1, 1, heads, *rate), q.new_empty(1, *a)
    _, constants, _ = _scan_triton._launch(16, q, v, rate, a)
    # 16 registers a thread for each array of the state's numbers, all keys and some columns of it.
    options = {"num_warps": constants.pop("num_warps")}
    scan = constants["SCAN"]
    assert scan.keys * scan.columns <= 512 * options["num_warps"] <= 512 * 8
    sizes = {"heads": heads, "keys": keys, "values": values}
    constants |= {name: 1 for name, size in sizes.items() if size == 1}
    for kernel in (_scan_triton.forward_kernel, _scan_triton.backward_kernel):
        pointers = {name: "fp32" for name in kernel.arg_names if name.endswith("_ptr")}
        given = {name: n for name, n in constants.items() if name in kernel.arg_names}
        code = compiled(kernel, target, pointers, given, options).asm["ttgir"]
        # Threads read what others have written, and a row's place may lie beyond 2^31.
        barriers = re.findall("gpu.barrier|barrier all", code)  # triton 3.6's, 3.7's
        assert len(barriers) == (2 if kernel is _scan_triton.backward_kernel else 0)
        assert re.search(r"tt\.addptr %v_ptr\S*, %\S+ : \S+, i64", code)


@pytest.mark.parametrize(
    ("target", "positions"),
    # Packed documents are all that the kernels are of without them, and their borders.
    [(HOPPER, "i32"), pytest.param(HOPPER, None, marks=pytest.mark.long)]
    + [pytest.param(*gpu.values, "i32", marks=pytest.mark.long) for gpu in OTHERS],
)
def test_long_filters(target, positions, tmp_path):
    from cat_lm.ops.long_filter import LENGTH, chunks_triton

    constants = chunks_triton.options(LENGTH, 16, 64, hip=target is MI300)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    for kernel in (chunks_triton.forward_kernel, chunks_triton.backward_kernel):
        pointers = {name: "fp32" for name in kernel.arg_names if name.endswith("_ptr")}
        pointers |= {"positions_ptr": positions, "x_ptr": "bf16", "y_ptr": "bf16"}
        pointers |= {"dy_ptr": "bf16", "dx_ptr": "bf16"}
        made = compiled(kernel, target, pointers, constants, options)
        if target is HOPPER:
            assert registers_and_stack(made, tmp_path)[1] <= 16  # bytes spilled of a thread


@pytest.mark.parametrize(
    ("target", "dtype", "block", "width"),
    [
        (HOPPER, torch.bfloat16, 64, 64),
        pytest.param(HOPPER, torch.bfloat16, 128, 128, marks=pytest.mark.long),
        pytest.param(HOPPER, torch.float16, 16, 80, marks=pytest.mark.long),
        pytest.param(HOPPER, torch.float32, 64, 64, marks=pytest.mark.long),
        pytest.param(HOPPER, torch.float32, 16, 128, marks=pytest.mark.long),
        pytest.param(HOPPER, torch.bfloat16, 32, 128, marks=pytest.mark.long),
        *(
            pytest.param(*gpu.values, torch.bfloat16, 64, 64, marks=pytest.mark.long)
            for gpu in OTHERS
        ),
    ],
)
def test_landmark_segments(target, dtype, block, width, tmp_path):
    from cat_lm.ops.landmark import segments_triton as kernels
    from cat_lm.ops.landmark.segments import why_not

    element = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    assert why_not(torch.device("cuda"), dtype, block, width) is None
    for kernel in (kernels.forward_kernel, kernels.backward_kernel):
        constants = kernels.options(block, width, dtype, kernel is kernels.backward_kernel)
        constants["PRECISION"] = "ieee" if target is MI300 else "tf32x3"
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        pointers = {name: "i64" for name in kernel.arg_names if name.endswith("_ptr")}
        exact = ("logs_ptr", "weights_ptr", "deltas_ptr", "dq_ptr", "dk_ptr", "dv_ptr")
        of_rows = ("q_ptr", "k_ptr", "v_ptr", "dy_ptr", "parts_ptr")
        pointers |= {name: "fp32" for name in exact if name in pointers}
        pointers |= {name: element for name in of_rows if name in pointers}
        made = compiled(kernel, target, pointers, constants, options, floats=("scaling",))
        if target is HOPPER:
            assert registers_and_stack(made, tmp_path)[1] <= 24  # bytes spilled of a thread
            # A warp group's products have at least 64 rows.
            product = "wgmma.mma_async" if constants["TILE"] >= 64 else "mma.sync"
            assert product in made.asm["ptx"]


def test_compiled_and_not_interpreted_here():
    assert not backend.INTERPRETED
