"""Autocast of a GPU that is not here casts CPU tensors as CUDA's own kernels cast tensors of a GPU."""

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fxcomp import compat
from fxcomp.compat.cuda_autocast import cuda_autocast

module: Any = importlib.import_module("fxcomp.compat.cuda_autocast")  # the package has its function by this name

HALF, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

TABLE = (module.LOWER_PRECISION, module.FLOAT32, module.FLOAT32_RESULT, module.WIDEST, module.BANNED)


def registered(key: str) -> set[str]:
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names}


def test_the_table_names_the_operators_of_cudas_kernels_once_each():
    names = [name for text in TABLE for name in text.split()]
    assert len(names) == len(set(names))
    # torch's build for CUDA has a kernel for cuDNN's RNNs, which are other operators on the CPU.
    assert set(names) >= registered("AutocastCUDA") - {"_cudnn_rnn"}
    if torch.__version__ >= "2.13":
        assert set(names) == registered("AutocastCUDA") - {"_cudnn_rnn"}


# Every operator beside CUDA's own kernel


def examples(make: Callable[..., Tensor]) -> dict[str, tuple[Sequence[Any], dict[str, Any]]]:
    """Arguments of every operator of the table, by its name; `make` makes a floating tensor of some sizes."""
    row, square, cube, image = make(8), make(8, 8), make(8, 8, 8), make(2, 4, 8, 8)
    video, signal = make(2, 4, 8, 8, 8), make(2, 4, 8)
    numbers = torch.zeros(8, dtype=torch.long, device=row.device)
    grid = torch.zeros(2, 8, 8, dtype=torch.long, device=row.device)
    weights = (make(32, 8), make(32, 8), make(32), make(32))
    three = (make(24, 8), make(24, 8), make(24), make(24))
    one = (square, square, row, row)
    conv = (image, make(4, 4, 3, 3), make(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    found: dict[str, Sequence[Any]] = {
        "_convolution": (*conv, False, False, True, True),
        "_convolution.deprecated": (*conv, False, False, True),
        "convolution": conv,
        "cudnn_convolution": (image, make(4, 4, 3, 3), [0, 0], [1, 1], [1, 1], 1, False, False, True),
        "cudnn_convolution_transpose": (
            image, make(4, 4, 3, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, True,
        ),
        "conv1d": (signal, make(4, 4, 3)),
        "conv2d": (image, make(4, 4, 3, 3), make(4)),
        "conv3d": (video, make(4, 4, 3, 3, 3)),
        "conv_tbc": (make(8, 2, 4), make(3, 4, 4), make(4)),
        "conv_transpose1d": (signal, make(4, 4, 3)),
        "conv_transpose2d.input": (image, make(4, 4, 3, 3)),
        "conv_transpose3d.input": (video, make(4, 4, 3, 3, 3)),
        "prelu": (square, make(1)),
        "addmm": (square, square, square), "addmv": (row, square, row), "addr": (square, row, row),
        "matmul": (square, square), "mm": (square, square), "mv": (square, row), "linear": (square, square, row),
        "einsum": ("ij,jk->ik", [square, square]), "linalg_vecdot": (square, square),
        "addbmm": (square, cube, cube), "baddbmm": (cube, cube, cube), "bmm": (cube, cube),
        "chain_matmul": ([square, square, square],), "linalg_multi_dot": ([square, square, square],),
        "_thnn_fused_lstm_cell": (make(8, 32), make(8, 32), square, make(32), make(32)),
        "_thnn_fused_gru_cell": (make(8, 24), make(8, 24), square),
        "lstm_cell": (square, [square, square], *weights), "gru_cell": (square, square, *three),
        "rnn_tanh_cell": (square, square, *one), "rnn_relu_cell": (square, square, *one),
        "_scaled_dot_product_flash_attention": (image, image, image),
        "pow.Tensor_Scalar": (row, 1.5), "pow.Tensor_Tensor": (row, row), "pow.Scalar": (2, row),
        "layer_norm": (square, [8]), "native_layer_norm": (square, [8], None, None, 1e-5), "rms_norm": (square, [8]),
        "group_norm": (image, 2), "frobenius_norm.dim": (square, [1]), "nuclear_norm": (square,),
        "nuclear_norm.dim": (square, [0, 1]), "cosine_similarity": (square, square),
        "poisson_nll_loss": (square, square, True, False, 1e-8, 1),
        "cosine_embedding_loss": (square, square, numbers), "nll_loss": (square, numbers),
        "nll_loss2d": (image, grid), "hinge_embedding_loss": (square, numbers),
        "margin_ranking_loss": (row, row, row), "multilabel_margin_loss": (row, numbers),
        "triplet_margin_loss": (square, square, square), "multi_margin_loss": (square, numbers),
        "dist": (row, row), "pdist": (square,), "cdist": (square, square), "renorm": (square, 2, 0, 1.0),
        "logsumexp": (square, [1]),
        "upsample_nearest1d": (signal, [4]), "_upsample_nearest_exact1d": (signal, [4]),
        "upsample_nearest2d": (image, [4, 4]), "_upsample_nearest_exact2d": (image, [4, 4]),
        "upsample_nearest3d": (video, [4, 4, 4]), "_upsample_nearest_exact3d": (video, [4, 4, 4]),
        "upsample_linear1d": (signal, [4], False), "upsample_bilinear2d": (image, [4, 4], False),
        "_upsample_bilinear2d_aa": (image, [4, 4], False), "upsample_trilinear3d": (video, [4, 4, 4], False),
        "upsample_bicubic2d": (image, [4, 4], False), "_upsample_bicubic2d_aa": (image, [4, 4], False),
        "prod": (row,), "prod.dim_int": (square, 1), "softmax.int": (square, 1), "log_softmax.int": (square, 1),
        "cumprod": (row, 0), "cumsum": (row, 0), "linalg_vector_norm": (row,), "linalg_matrix_norm": (square, 2),
        "linalg_matrix_norm.str_ord": (square,), "sum": (row,), "sum.dim_IntList": (square, [1]),
        "norm.Scalar": (row,), "norm.ScalarOpt_dim": (square, 1, [1]),
        "addcdiv": (row, row, row), "addcmul": (row, row, row), "atan2": (row, row),
        "bilinear": (make(2, 4), make(2, 4), make(3, 4, 4), make(3)), "cross": (make(3), make(3)),
        "dot": (row, row), "vdot": (row, row), "grid_sampler": (image, make(2, 8, 8, 2), 0, 0, False),
        "index_put": (row, [numbers], row), "tensordot": (square, square, [1], [0]),
        "scatter_add": (row, 0, numbers, row), "binary_cross_entropy": (square, square),
    }  # fmt: skip
    unary = "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus"
    losses = "kl_div l1_loss smooth_l1_loss huber_loss mse_loss soft_margin_loss binary_cross_entropy_with_logits"
    found |= dict.fromkeys(unary.split(), (row,)) | dict.fromkeys(losses.split(), (square, square))
    names = {"softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "cumsum", "linalg_vector_norm"}
    typed = {f"{name} of a named type": (args, {"dtype": BF16}) for name, args in found.items() if name in names}
    return {name: (args, {}) for name, args in found.items()} | typed


NOT_ON_CPU_BUILDS = {
    "scaled_dot_product_attention", "cudnn_convolution", "cudnn_convolution_transpose", "_thnn_fused_gru_cell",
    "gru_cell", "grid_sampler",
}  # fmt: skip
"""Operators of the table that torch's build for the CPU does not run on fakes of a GPU."""


def types_on(device: str, types: Sequence[torch.dtype]) -> dict[str, str]:
    """The types that each operator returns for arguments of some types in turn, or the type of its error."""
    found: dict[str, str] = {}
    made = 0

    def make(*sizes: int) -> Tensor:
        nonlocal made
        made += 1
        return torch.empty(sizes, dtype=types[made % len(types)], device=device)

    with FakeTensorMode(), torch.no_grad():
        for name, (args, kwargs) in examples(make).items():
            try:
                out = module._operator(name.split(" ")[0])(*args, **kwargs)
                found[name] = str([each.dtype for each in pytree.tree_leaves(out) if isinstance(each, Tensor)])
            except Exception as error:
                found[name] = type(error).__name__
    return found


DRAWS = [(HALF,), (F32,), (F64,), (HALF, F32), (F32, HALF, HALF), (BF16,)]
"""Types of arguments, in turn, beside autocast in float16."""


def compare_with_cudas_kernels() -> None:
    """Print operators whose result types differ from those of torch's AutocastCUDA kernels on fake CUDA tensors."""
    for types in DRAWS:
        torch._C.set_autocast_enabled("cuda", True)
        by_cuda = types_on("cuda", types)
        torch._C.set_autocast_enabled("cuda", False)
        with cuda_autocast(), torch.autocast("cuda"):
            by_us = types_on("cpu", types)
        named = {name.split(" ")[0] for name in by_cuda}
        assert named >= registered("AutocastCUDA") - {"_cudnn_rnn", "scaled_dot_product_attention"}
        assert sum(text.startswith("[") for text in by_cuda.values()) > 60, by_cuda
        for name in by_cuda.keys() - NOT_ON_CPU_BUILDS:
            if by_cuda[name] != by_us[name]:
                print(name, types, by_cuda[name], by_us[name])


def in_a_process(function: Callable[[], None]) -> str:
    """Call a function of this file in a process of its own: torch's build for the CPU may abort there."""
    code = (
        "import logging, sys, warnings; logging.disable(); warnings.simplefilter('ignore');"
        f"sys.path[:0] = {sys.path!r}; import test_cuda_autocast; test_cuda_autocast.{function.__name__}()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_operator_has_the_types_that_cudas_kernel_gives_it():
    assert in_a_process(compare_with_cudas_kernels) == ""


# Types, by hand


WEIGHT, ROWS = torch.randn(8, 8), torch.randn(4, 8)

CALLS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), F32),
    "softmax": (lambda x: F.softmax(x, -1), F32),
    "log_softmax": (lambda x: F.log_softmax(x, -1), F32),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)), F32),
    "group_norm": (lambda x: F.group_norm(x, 2), F32),
    "sum": (lambda x: x.sum(), F32),
    "pow": (lambda x: x.pow(2), F32),
    "rsqrt": (lambda x: x.abs().rsqrt(), F32),
    "norm": (lambda x: x.norm(), F32),
    "matmul": (lambda x: x @ WEIGHT, BF16),
    "linear": (lambda x: F.linear(x, WEIGHT), BF16),
    "conv2d": (lambda x: F.conv2d(x.reshape(1, 1, 4, 8), torch.ones(2, 1, 3, 3)), BF16),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, WEIGHT), BF16),
    "prelu": (lambda x: F.prelu(x, torch.ones(1)), BF16),
    "lstm": (lambda x: nn.LSTM(8, 8)(x)[0], BF16),
    "gru": (lambda x: nn.GRU(8, 8)(x)[0], BF16),
    "gru_cell": (lambda x: nn.GRUCell(8, 8)(x), BF16),
    "attention": (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), BF16),
}
"""Calls under autocast in bfloat16, and the type of their results."""


@pytest.mark.parametrize("given", [BF16, F32])
@pytest.mark.parametrize("name", CALLS)
def test_an_operator_computes_in_cudas_type_on_tensors_in_a_trace_and_in_backward(name: str, given: torch.dtype):
    call, expected = CALLS[name]
    x = ROWS.to(given, copy=True).requires_grad_()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", BF16):
            out = call(x)
        return out, torch.autograd.grad(out.float().sum(), x)[0]

    with cuda_autocast():
        out, gradient = step(x)
        traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    assert (out.dtype, gradient.dtype) == (expected, given)
    returned: Any = traced.graph.output_node().args[0]
    assert [node.meta["val"].dtype for node in returned] == [expected, given]


@pytest.mark.parametrize(("types", "expected"), [((BF16, BF16), BF16), ((BF16, F32), F32), ((F64, F64), F64)])
def test_operators_of_several_tensors_take_the_widest_type(types: tuple[torch.dtype, torch.dtype], expected: Any):
    one, two = (torch.ones(4, dtype=dtype) for dtype in types)
    with cuda_autocast(), torch.autocast("cuda", BF16):
        assert torch.addcmul(one, two, two).dtype is expected
        assert torch.cat([one, two]).dtype is expected
        assert torch.stack([one, two]).dtype is expected
        assert F.grid_sample(one.reshape(1, 1, 2, 2), two.reshape(1, 1, 2, 2), align_corners=False).dtype is expected


def test_a_type_that_is_neither_autocasts_nor_float32_is_not_widened():
    with cuda_autocast(), torch.autocast("cuda", BF16), pytest.raises(RuntimeError, match="Unexpected floating Scalar"):
        torch.addcmul(torch.ones(4, dtype=HALF), torch.ones(4), torch.ones(4))


def test_a_result_whose_type_is_named_has_it():
    with cuda_autocast(), torch.autocast("cuda"):
        assert ROWS.sum(dtype=BF16).dtype is BF16
        assert F.softmax(ROWS, -1, dtype=F64).dtype is F64


def test_binary_cross_entropy_raises_torchs_error():
    with cuda_autocast(), torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(torch.ones(4), torch.ones(4))


# Weights


def casts_of(function: Callable[[Tensor, Tensor], Tensor], **options: Any) -> int:
    """The number of casts of a weight in the trace of a function under autocast."""
    made: list[Tensor] = []

    def step(x: Tensor, weight: Tensor) -> Tensor:
        weight = weight.detach().requires_grad_()
        made.append(weight)
        torch.set_autocast_cache_enabled(True)  # make_fx switches it off
        with torch.autocast("cuda", **options):
            out = function(x, weight)
        return torch.autograd.grad(out.float().sum(), weight)[0]

    with cuda_autocast():
        traced = make_fx(step, tracing_mode="fake")(ROWS.half(), torch.randn(8, 8))
    to_half = [node for node in traced.graph.nodes if node.target is torch.ops.aten._to_copy.default]
    return sum(node.meta["val"].dtype is HALF and node.meta["val"].shape == (8, 8) for node in to_half)


def test_a_weight_is_cast_once_in_a_block_whatever_uses_it():
    def thrice(x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("ij,jk->ik", F.linear(x @ weight, weight), weight)

    assert casts_of(thrice) == 1
    assert casts_of(thrice, cache_enabled=False) == 3


def test_a_cast_is_forgotten_when_the_outermost_block_ends():
    weight = torch.randn(8, 8, requires_grad=True)
    with cuda_autocast():
        results: list[Tensor] = []
        for _ in range(2):
            with torch.autocast("cuda"):
                with torch.autocast("cuda"):
                    results.append(ROWS @ weight)
                results.append(ROWS @ weight)
            with torch.no_grad():
                weight.zero_()
    assert results[0].equal(results[1])
    assert results[0].any()
    assert not results[2].any()


# Switches


def product() -> torch.dtype:
    return (ROWS @ WEIGHT).dtype


def test_either_device_type_switches_autocast_on_and_no_warning_is_given():
    with cuda_autocast(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for block, expected in (
            (torch.autocast("cuda"), HALF),
            (torch.amp.autocast("cuda", dtype=BF16), BF16),
            (torch.autocast("cpu"), BF16),
            (torch.autocast("cpu", HALF), HALF),
            (torch.autocast("cuda", enabled=False), F32),
        ):
            with block:
                assert product() is expected
            assert product() is F32
            assert block(product)() is expected  # as a decorator


def test_the_older_names_of_autocast_and_of_its_state_work():
    with cuda_autocast(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are deprecated
        with torch.cuda.amp.autocast():
            assert product() is HALF
            assert torch.get_autocast_gpu_dtype() is HALF
            assert torch.is_autocast_enabled()
            assert not torch.is_autocast_cpu_enabled()
        torch.set_autocast_gpu_dtype(BF16)
        with torch.autocast("cuda"):
            assert product() is BF16
        with torch.cpu.amp.autocast():
            assert torch.is_autocast_cpu_enabled()
            assert torch.get_autocast_cpu_dtype() is BF16


def test_state_is_that_of_each_device_type():
    with cuda_autocast(), torch.autocast("cuda"):
        assert torch.is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled("cpu")
        assert (torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")) == (HALF, BF16)
        with torch.autocast("cpu", enabled=False):
            assert product() is HALF
        with torch.autocast("cpu", BF16):
            assert product() is HALF
        with torch.autocast("cuda", enabled=False):
            assert product() is F32
        with torch.autocast("cuda", BF16):
            assert product() is BF16
        assert product() is HALF
    with cuda_autocast():
        torch.set_autocast_dtype("cuda", BF16)
        with torch.autocast("cuda"):
            assert product() is BF16
        with compat.without_autocast(), torch.autocast("cuda"), compat.without_autocast():
            assert product() is F32
        assert torch.get_autocast_dtype(device_type="cuda") is BF16
        with torch.autocast("cuda:0"):
            assert product() is BF16


class Scaled(torch.autograd.Function):
    """A custom function for a GPU, as libraries write it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=F32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


def test_a_custom_function_gets_its_inputs_in_its_type_and_autocast_off():
    x, weight = ROWS.half().requires_grad_(), WEIGHT.clone().requires_grad_()
    with cuda_autocast():
        with torch.autocast("cuda"):
            out = Scaled.apply(x, weight)
        assert out.dtype is F32
        out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is F32


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_computes_again_under_the_same_autocast(reentrant: bool):
    weight, seen = WEIGHT.clone().requires_grad_(), list[torch.dtype]()

    def block(x: Tensor) -> Tensor:
        out = x @ weight
        seen.append(out.dtype)
        return out.sin()

    with cuda_autocast():
        with torch.autocast("cuda", BF16):
            out: Any = checkpoint(block, ROWS.clone().requires_grad_(), use_reentrant=reentrant)
        out.float().sum().backward()
    assert seen == [BF16, BF16]


# The scope


def state() -> list[Any]:
    devices = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cuda", "cpu", "maia")]
    names = [name for name in vars(torch) if "autocast" in name]
    kernels = [torch._C._dispatch_dump(f"aten::{name}") for name in ("softmax.int", "mm", "lstm.input", "stack")]
    default = torch.utils.checkpoint.DefaultDeviceType._default_device_type
    return [*devices, *(getattr(torch, name) for name in names), *kernels, torch.autocast.__init__, default]


def test_everything_is_as_before_afterwards_also_after_an_exception():
    before = state()

    def run() -> None:
        with cuda_autocast(), torch.autocast("cuda"):
            torch.set_autocast_dtype("cpu", HALF)
            torch.set_autocast_enabled("cpu", True)
            assert product() is HALF
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert state() == before
    with torch.autocast("cpu", BF16):
        assert F.softmax(ROWS.bfloat16(), -1).dtype is BF16  # the CPU's own list


def test_without_a_block_of_autocast_nothing_is_cast():
    with cuda_autocast():
        assert product() is F32
        assert F.layer_norm(ROWS.half(), (8,)).dtype is HALF


def test_autocast_that_is_on_around_the_scope_stays_on():
    with torch.autocast("cpu", BF16), cuda_autocast():
        assert product() is BF16
        assert F.softmax(ROWS.bfloat16(), -1).dtype is F32


def test_the_scope_is_not_entered_twice():
    with cuda_autocast(), pytest.raises(AssertionError, match="not entered twice"), cuda_autocast():
        pass
