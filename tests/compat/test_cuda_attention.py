"""Attention of a GPU that is not here is the operator that torch would choose on that GPU."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fxcomp
from fxcomp import errors
from fxcomp.compat import is_random
from fxcomp.compat.cuda_attention import cuda_attention
from fxcomp.compat.cuda_autocast import cuda_autocast
from fxcomp.frontends.what_if import capture_job
from fxcomp.graph.work import Basis, basis, flops, math_type, operator_text, touched_bytes

HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

VOLTA, AMPERE, ADA, HOPPER = (7, 0), (8, 0), (8, 9), (9, 0)

FLASH, EFFICIENT, CUDNN, MATH = "flash", "efficient", "cudnn", "math"


def kernel_of(gm: torch.fx.GraphModule) -> str:
    """The one kernel that a trace has forward and backward."""
    names = Counter(operator_text(node.target).removeprefix("aten.") for node in gm.graph.nodes)
    for kernel in (FLASH, EFFICIENT, CUDNN):
        forward = f"_scaled_dot_product_{kernel}_attention"
        if names[forward]:
            assert (names[forward], names[f"{forward}_backward"], names["bmm"]) == (1, 1, 0), names
            return kernel
    assert names["bmm"] >= 4, names
    return MATH


def trace(
    capability: tuple[int, int],
    dtype: torch.dtype = BF16,
    *,
    sizes: tuple[int, ...] = (2, 4, 16, 64),
    keys: tuple[int, ...] | None = None,
    mask: Tensor | None = None,
    **options: Any,
) -> torch.fx.GraphModule:
    """Trace attention and its gradients on fakes."""

    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        wanted = [each for each in (q, k, v, mask) if each is not None and each.requires_grad]
        return torch.autograd.grad(out.float().square().sum(), wanted)

    with FakeTensorMode() as mode, cuda_attention(capability):
        q, k, v = (torch.empty(each or sizes, dtype=dtype, requires_grad=True) for each in (None, keys, keys))
        return make_fx(step)(q, k, v, None if mask is None else mode.from_tensor(mask))


def ones(*sizes: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.ones(sizes, dtype=dtype, requires_grad=grad)


@pytest.mark.parametrize(
    ("capability", "dtype", "options", "expected"),
    [
        (AMPERE, BF16, {}, FLASH),
        (AMPERE, HALF, {"is_causal": True}, FLASH),
        (AMPERE, BF16, {"dropout_p": 0.1}, FLASH),
        (AMPERE, BF16, {"scale": 0.5}, FLASH),
        (AMPERE, BF16, {"sizes": (2, 4, 16, 36)}, FLASH),  # padded to 40
        (AMPERE, BF16, {"sizes": (2, 4, 16, 256)}, FLASH),
        (AMPERE, BF16, {"sizes": (2, 4, 16, 264)}, EFFICIENT),
        (AMPERE, BF16, {"keys": (2, 2, 16, 64), "enable_gqa": True}, FLASH),
        (AMPERE, F32, {"keys": (2, 2, 16, 64), "enable_gqa": True}, MATH),
        (AMPERE, BF16, {"keys": (2, 4, 13, 64)}, FLASH),
        (AMPERE, BF16, {"keys": (2, 4, 13, 64), "is_causal": True}, EFFICIENT),
        (AMPERE, F32, {}, EFFICIENT),
        (AMPERE, F32, {"sizes": (2, 4, 16, 6)}, MATH),
        (AMPERE, torch.float64, {}, MATH),
        (AMPERE, BF16, {"sizes": (4, 16, 64)}, MATH),
        (AMPERE, BF16, {"mask": ones(16, 16, dtype=torch.bool)}, EFFICIENT),
        (AMPERE, BF16, {"mask": ones(2, 1, 16, 16)}, EFFICIENT),
        (AMPERE, BF16, {"mask": ones(16, 13), "keys": (2, 4, 13, 64)}, EFFICIENT),
        (AMPERE, BF16, {"mask": ones(16, 16, grad=True)}, EFFICIENT),
        (AMPERE, BF16, {"mask": ones(16, 16), "is_causal": True}, EFFICIENT),
        (AMPERE, BF16, {"mask": ones(16, 1).expand(16, 16)}, MATH),
        (ADA, BF16, {"sizes": (2, 4, 16, 192)}, FLASH),
        (ADA, BF16, {"sizes": (2, 4, 16, 200)}, EFFICIENT),
        (ADA, BF16, {"sizes": (2, 4, 16, 256)}, FLASH),
        (ADA, BF16, {"sizes": (2, 4, 16, 256), "dropout_p": 0.5}, EFFICIENT),
        (VOLTA, HALF, {}, EFFICIENT),
        (VOLTA, HALF, {"sizes": (2, 4, 16, 36)}, MATH),
        (VOLTA, F32, {"sizes": (2, 4, 16, 6)}, EFFICIENT),
        (VOLTA, BF16, {}, MATH),
        (HOPPER, BF16, {}, CUDNN),
        (HOPPER, BF16, {"is_causal": True, "keys": (2, 4, 13, 64)}, CUDNN),
        (HOPPER, BF16, {"keys": (2, 2, 16, 64), "enable_gqa": True}, CUDNN),
        (HOPPER, BF16, {"mask": ones(16, 16, dtype=torch.bool)}, CUDNN),
        (HOPPER, BF16, {"mask": ones(16, 16, grad=True)}, EFFICIENT),
        (HOPPER, BF16, {"sizes": (2, 4, 16, 256)}, FLASH),
        (HOPPER, BF16, {"sizes": (2, 4, 16, 36)}, FLASH),
        (HOPPER, BF16, {"dropout_p": 0.25}, CUDNN),
        (HOPPER, BF16, {"dropout_p": 0.1}, FLASH),  # cuDNN takes sixteenths
        (HOPPER, F32, {}, EFFICIENT),
    ],
)
def test_attention_is_the_kernel_that_the_gpu_chooses(
    capability: tuple[int, int], dtype: torch.dtype, options: dict[str, Any], expected: str
):
    assert kernel_of(trace(capability, dtype, **options)) == expected


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ([SDPBackend.FLASH_ATTENTION], FLASH),
        ([SDPBackend.EFFICIENT_ATTENTION], EFFICIENT),
        ([SDPBackend.CUDNN_ATTENTION], CUDNN),
        ([SDPBackend.MATH], MATH),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], FLASH),
    ],
)
def test_the_kernels_that_the_user_allows_count(kernels: list[SDPBackend], expected: str):
    with sdpa_kernel(kernels):
        assert kernel_of(trace(AMPERE)) == expected


def test_the_order_that_the_user_gives_the_kernels_counts():
    def attend(q: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
            return F.scaled_dot_product_attention(q, q, q).sum()

    with FakeTensorMode(), cuda_attention(HOPPER):
        traced = make_fx(lambda q: torch.autograd.grad(attend(q), q))(ones(2, 4, 16, 64, grad=True))
    assert kernel_of(traced) == EFFICIENT


def test_flags_and_the_environment_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kernel_of(trace(HOPPER)) == FLASH
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert kernel_of(trace(HOPPER)) == EFFICIENT
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_deterministic_algorithms_are_not_cudnns():
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel_of(trace(HOPPER)) == FLASH
    finally:
        torch.use_deterministic_algorithms(False)


def test_where_no_kernel_is_allowed_torchs_error_is_raised():
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), pytest.raises(RuntimeError, match="No available kernel"):
        trace(AMPERE, F32)


def test_a_wrong_call_raises_torchs_error():
    with pytest.raises(RuntimeError, match="is_causal"):
        trace(VOLTA, is_causal=True, mask=ones(16, 16))
    with cuda_attention(AMPERE), pytest.raises(RuntimeError, match="same dtype"):
        F.scaled_dot_product_attention(ones(1, 1, 4, 8), ones(1, 1, 4, 8), ones(1, 1, 4, 8, dtype=F32))


def test_multi_head_attention_under_autocast_is_flash_attention():
    module = nn.MultiheadAttention(64, 4, batch_first=True)

    def step(x: Tensor, *weights: Tensor) -> Any:
        with torch.autocast("cuda", BF16):
            given = dict(zip(names, weights, strict=True))
            out, _ = torch.func.functional_call(module, given, (x, x, x), {"need_weights": False})
        return torch.autograd.grad(out.float().sum(), x)

    names, weights = zip(*module.named_parameters(), strict=True)
    with cuda_autocast(), cuda_attention(AMPERE):
        traced = make_fx(step, tracing_mode="fake")(torch.randn(2, 16, 64, requires_grad=True), *weights)
    assert kernel_of(traced) == FLASH


def test_attention_under_inference_mode_is_the_gpus_too():
    def step(q: Tensor) -> Tensor:
        with torch.inference_mode():
            return F.scaled_dot_product_attention(q, q, q)

    with FakeTensorMode(), cuda_attention(AMPERE):
        traced = make_fx(step)(ones(2, 4, 16, 64))
    assert "aten._scaled_dot_product_flash_attention.default" in [str(node.target) for node in traced.graph.nodes]


def test_real_tensors_are_attended_to_as_on_the_cpu_and_nothing_remains():
    def both() -> tuple[Tensor, Tensor]:
        q = torch.linspace(-1, 1, 2 * 4 * 16 * 8).view(2, 4, 16, 8).requires_grad_()
        out = F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True, scale=0.3)
        return out, torch.autograd.grad(out.square().sum(), q)[0]

    def state() -> tuple[Any, ...]:
        return torch._C._get_sdp_priority_order(), torch._C._dispatch_dump("aten::scaled_dot_product_attention")

    expected, before = both(), state()
    with cuda_attention(HOPPER):
        found = both()
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    assert state() == before

    def broken() -> None:
        with cuda_attention(HOPPER):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert state() == before


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_nested_tensors_are_left_alone():
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    q = nested.unflatten(-1, [2, 4]).transpose(1, 2)
    expected = F.scaled_dot_product_attention(q, q, q)
    with cuda_attention(AMPERE):
        found = F.scaled_dot_product_attention(q, q, q)
    assert [one.equal(other) for one, other in zip(found.unbind(), expected.unbind(), strict=True)] == [True, True]


# Work


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"), [(AMPERE, BF16, FLASH), (HOPPER, BF16, CUDNN), (AMPERE, F32, EFFICIENT)]
)
@pytest.mark.parametrize(("causal", "share"), [(False, 1), (True, 2)])
def test_the_work_of_each_kernel_is_counted(
    capability: tuple[int, int], dtype: torch.dtype, kernel: str, causal: bool, share: int
):
    traced = trace(capability, dtype, is_causal=causal)
    found = [node for node in traced.graph.nodes if f"{kernel}_attention" in str(node.target)]
    product = 2 * 2 * 4 * 16 * 16 * 64
    assert [flops(node) for node in found] == [2 * product / share, 5 * product / share]
    assert [basis(node) for node in found] == [Basis.WORK, Basis.WORK]
    assert {math_type(node) for node in found} == {"bf16" if dtype is BF16 else "f32"}
    tensor = 2 * 4 * 16 * 64 * dtype.itemsize
    for node, tensors in zip(found, (4, 8), strict=True):  # q, k, v, out; and the gradients of all four
        assert tensors * tensor <= touched_bytes(node) <= tensors * tensor + 4096


def test_heads_of_keys_that_serve_several_queries_count_for_each():
    traced = trace(AMPERE, keys=(2, 2, 16, 64), enable_gqa=True)
    found = next(node for node in traced.graph.nodes if "flash_attention" in str(node.target))
    assert flops(found) == 2 * 2 * 2 * 4 * 16 * 16 * 64


# A whole step


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.norm(x)).split(64, 2)
        q, k, v = (part.view(rows, length, 4, 16).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, 64))


class Model(nn.Module):
    """A GPT of two blocks, whose head is its embedding."""

    def __init__(self, dropout: float, run: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(100, 64), nn.LayerNorm(64)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return F.linear(self.norm(x), self.embedding.weight)


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def again(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def without_state(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def operators_of(device: str, dtype: torch.dtype, *, dropout: float = 0.0, run: Any = plainly) -> Counter[str]:
    """Count a step's operators as a device would be given them, with the type of their first result."""
    model = Model(dropout, run)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype):
            scores = model(tokens)
            return F.cross_entropy(scores.view(-1, 100), tokens.view(-1))

    job = fxcomp.Job(model, loss, torch.optim.AdamW(model.parameters()), torch.zeros(2, 16, dtype=torch.long))
    _, captured = capture_job(job, device)
    found: Counter[str] = Counter()
    for node in captured.graph.graph.nodes:
        value: Any = node.meta.get("val")
        first = value[0] if isinstance(value, tuple | list) and value else value
        if node.op == "call_function" and isinstance(first, Tensor):
            name = operator_text(node.target).removeprefix("aten.").removeprefix("_scaled_dot_product_")
            found[f"{name} {str(first.dtype).removeprefix('torch.')}"] += 1
    return found


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"), [("a100", BF16, FLASH), ("h100", BF16, CUDNN), ("v100", HALF, EFFICIENT)]
)
def test_a_gpt_under_autocast_has_its_devices_kernels_in_its_devices_types(
    device: str, dtype: torch.dtype, kernel: str
):
    found = operators_of(device, dtype)
    low = str(dtype).removeprefix("torch.")
    expected = {
        f"{kernel}_attention {low}": 2,
        f"{kernel}_attention_backward {low}": 2,
        "native_layer_norm float32": 3,
        "native_layer_norm_backward float32": 3,
        # CUDA's cross_entropy names log_softmax's type, so it stays that of the scores; the loss is float32.
        f"_log_softmax {low}": 1,
        "nll_loss_forward float32": 1,
        "nll_loss_backward float32": 1,
        f"addmm {low}": 4,
        f"mm {low}": 1 + 2 * 5,
    }
    assert {name: found[name] for name in expected} == expected
    assert not any(name.split(" ")[1] == "float32" for name in found if name.startswith(("mm", "addmm", "bmm")))


def test_dropout_inside_activation_checkpointing_draws_the_same_masks_again():
    found = operators_of("a100", BF16, dropout=0.1, run=again)
    assert (found["flash_attention bfloat16"], found["flash_attention_backward bfloat16"]) == (4, 2)
    assert found["rng_state uint8"] > 0


def test_other_masks_in_the_backward_pass_are_refused():
    with pytest.raises(errors.CaptureFailed, match="preserve_rng_state"):
        operators_of("a100", BF16, dropout=0.1, run=without_state)


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_only_the_forward_pass_of_attention_draws(name: str):
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward").default
    assert is_random(forward)
    assert not is_random(backward), "it repeats the draws of the seed that forward returned"
