"""The head's gradient equals autograd's dense one, whether it is dense or added to a buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from replay_oracle import EMPTY, SINGLE, error, leaves, random_sets, targets_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import score
from tests.documentation_blocks import block_with
from tests.triton_subprocess import run_in_subprocess

pytestmark = pytest.mark.usefixtures("dense")

V, H = 61, 19
SIZES = [3, SINGLE, 7, EMPTY, 30, 2, SINGLE, EMPTY, 12, 5, 2]
T = len(SIZES)
WIDE = [torch.float32, torch.float64]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)


def value_of(hidden, weight, weight_grad="dense", *, batch: int = 0, **options) -> torch.Tensor:
    """Return a scalar score of one micro-batch whose gradient differs at every candidate."""
    sets = random_sets(SIZES, V, seed=batch)
    got = score(hidden, weight, targets_of(sets), sets, entropy=True, weight_grad=weight_grad, **options)
    return (got.logprobs * draw(T, seed=1)).sum() + (got.entropy * draw(T, seed=2)).sum()


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return leaves(draw(T, H, dtype=dtype), draw(V, H, dtype=dtype))


def accumulated(dtype: torch.dtype, batches: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `hidden` and `weight` that autograd accumulates over micro-batches."""
    hidden, weight = inputs(dtype)
    for batch in range(batches):
        value_of(hidden, weight, batch=batch, **options).backward()
    return hidden.grad, weight.grad


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("chunk", [1, 3, None])
def test_micro_batches_in_a_buffer_equal_the_dense_gradient_to_the_last_bit(chunk, dtype):
    hidden, weight = inputs(dtype)
    weight.grad = torch.zeros_like(weight)
    buffer = weight.grad
    for batch in range(3):
        value_of(hidden, weight, weight.grad, batch=batch).backward()
    assert weight.grad is buffer
    dense_hidden, dense_weight = accumulated(dtype, 3)
    assert torch.equal(buffer, dense_weight)
    assert torch.equal(hidden.grad, dense_hidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk", [1, 3, None])
def test_a_float32_buffer_under_half_precision_is_not_rounded(chunk, dtype):
    hidden, weight = inputs(dtype)
    exact_hidden, exact = leaves(hidden.double(), weight.double())
    main_grad = torch.zeros(V, H)
    own_grad = torch.zeros(V, H, dtype=dtype)
    for batch in range(3):
        value_of(exact_hidden, exact, batch=batch).backward()
        for buffer in (main_grad, own_grad):
            value_of(hidden, weight, buffer, batch=batch).backward()
    assert weight.grad is None
    assert error(main_grad, exact.grad) < 3e-6
    # Each micro-batch's sum is rounded once, when it is added.
    assert error(own_grad, exact.grad) < 3 * torch.finfo(dtype).eps


class _Through(torch.autograd.Function):
    """Return the gradient that `weight_grad` writes to a buffer, for gradcheck."""

    @staticmethod
    def forward(ctx, hidden, weight):
        with torch.enable_grad():
            ctx.leaves = leaves(hidden, weight)
            ctx.buffer = torch.zeros_like(weight)
            ctx.value = value_of(*ctx.leaves, ctx.buffer)
        return ctx.value.detach()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.leaves
        hidden.grad = None
        ctx.buffer.zero_()
        ctx.value.backward(grad, retain_graph=True)
        assert weight.grad is None
        return hidden.grad, ctx.buffer


def test_gradcheck():
    assert torch.autograd.gradcheck(_Through.apply, tuple(inputs(torch.float64)), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_to_the_last_bit(dtype):
    buffers = []
    for _ in range(2):
        hidden, weight = inputs(dtype)
        buffers.append(draw(V, H, seed=5))
        for batch in range(2):
            value_of(hidden, weight, buffers[-1], batch=batch).backward()
    assert torch.equal(*buffers)


def test_two_backwards_add_twice():
    hidden, weight = inputs()
    buffer = torch.zeros(V, H)
    value = value_of(hidden, weight, buffer)
    value.backward(retain_graph=True)
    once = buffer.clone()
    value.backward()
    assert torch.equal(buffer, 2 * once)
    assert torch.equal(once, accumulated(torch.float32, 1)[1])


def test_a_buffer_is_left_alone_where_autograd_asks_for_no_gradient_of_the_weight():
    hidden, weight = inputs()
    buffer = torch.zeros(V, H)
    torch.autograd.grad(value_of(hidden, weight, buffer), hidden)
    value_of(hidden, weight, buffer).backward(inputs=[hidden])
    value_of(hidden, weight.detach(), buffer).backward()
    with torch.no_grad():
        value_of(hidden, weight, buffer)
    assert not buffer.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(reentrant):
    hidden, weight = inputs()
    buffer = torch.zeros(V, H)
    for batch in range(2):

        def part(states, batch=batch):
            return value_of(states * 1.0, weight, buffer, batch=batch)

        checkpoint(part, hidden, use_reentrant=reentrant).backward()
    dense_hidden, dense_weight = accumulated(torch.float32, 2)
    assert torch.equal(buffer, dense_weight)
    assert torch.equal(hidden.grad, dense_hidden)


def test_a_weight_that_is_also_the_embedding():
    """Autograd adds the embedding's part to `weight.grad`, in place, beside ours."""
    results = []
    for buffered in (False, True):
        hidden, weight = inputs(torch.float64)
        if buffered:
            weight.grad = torch.zeros_like(weight)
        for batch in range(2):
            embedded = torch.nn.functional.embedding(torch.arange(T) % 5, weight)
            where = weight.grad if buffered else "dense"
            value_of(hidden + embedded, weight, where, batch=batch).backward()
        results.append(weight.grad)
    assert error(*results) < 1e-14


@pytest.mark.parametrize("dense", ["none"], indirect=True)
def test_a_buffer_needs_no_tensor_as_large_as_the_head():
    vocab, width = 50_000, 8
    sets = random_sets([5] * 40, vocab)
    hidden, weight = leaves(draw(40, width), draw(vocab, width))
    buffer = torch.zeros_like(weight)
    given = [tensor.untyped_storage().data_ptr() for tensor in (weight, buffer)]

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    made = tensor.untyped_storage().data_ptr() not in given
                    self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.itemsize * made)
            return result

    with Largest() as largest:
        got = score(hidden, weight, targets_of(sets), sets, weight_grad=buffer)
        torch.autograd.grad(got.logprobs.sum(), [hidden, weight], allow_unused=True)
    assert 0 < largest.numel <= 40 * 5 * width


def test_layouts_in_memory():
    hidden, weight = inputs()
    across = torch.zeros(H, V).t()
    within = torch.zeros(V + 3, H + 2)[3:, 2:]
    for buffer in (across, within):
        value_of(hidden, weight, buffer).backward()
        assert torch.equal(buffer, accumulated(torch.float32, 1)[1])


class _Megatron:
    """Mimics how Megatron's data parallelism treats a parameter during the backward pass."""

    def __init__(self, weight: torch.Tensor, *, tied: bool) -> None:
        self.weight, self.calls = weight, 0
        weight.main_grad = torch.zeros(weight.shape)
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = tied
        self.accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
        self.accumulator.register_hook(self.after)

    def after(self, *_: object) -> None:
        weight = self.weight
        assert weight.grad is not None  # it asks for it where reductions overlap the backward
        if not weight.grad_added_to_main_grad or weight.zero_out_wgrad:
            weight.main_grad.add_(weight.grad.data)
        weight.grad = None
        self.calls += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_megatrons_main_grad(tied, dtype):
    def run(weight_grad):
        hidden, weight = inputs(dtype)
        megatron = _Megatron(weight, tied=tied)
        for batch in range(2):
            states = hidden
            if tied:
                states = hidden + torch.nn.functional.embedding(torch.arange(T) % 5, weight)
            where = weight.main_grad if weight_grad == "buffer" else "dense"
            value_of(states, weight, where, batch=batch).backward()
        assert megatron.calls == 2
        assert weight.grad_added_to_main_grad == (weight_grad == "buffer")
        return weight.main_grad

    bound = 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert error(run("buffer"), run("dense")) < bound


def test_another_buffer_than_main_grad_raises_no_flag():
    hidden, weight = inputs()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(V, H), False
    value_of(hidden, weight, torch.zeros(V, H)).backward()
    assert not weight.grad_added_to_main_grad
    assert weight.grad is None


def test_weight_grad_is_not_exchanged_between_forward_and_backward():
    hidden, weight = inputs()
    for exchanged in (None, torch.zeros(V, H)):
        weight.grad = torch.zeros(V, H)
        value = value_of(hidden, weight, weight.grad)
        weight.grad = exchanged
        with pytest.raises(InvalidInputError, match=r"weight_grad: it was weight\.grad .* would be lost"):
            value.backward()


ERRORS = {
    "got None, expected 'dense' or a buffer.*; where weight.grad is None": lambda w: None,
    "got 'main_grad', expected": lambda w: "main_grad",
    r"got shape \(60, 19\) .* expected a dense \(61, 19\)": lambda w: torch.zeros(V - 1, H),
    "got shape .* and layout torch.sparse_coo": lambda w: torch.zeros(V, H).to_sparse(),
    "got dtype torch.float64, expected torch.float32 or weight's torch.bfloat16": lambda w: torch.zeros(
        V, H, dtype=torch.float64
    ),
    "got dtype torch.float16": lambda w: torch.zeros(V, H, dtype=torch.float16),
    "it is on meta, and weight is on cpu": lambda w: torch.zeros(V, H, device="meta"),
    "it requires a gradient": lambda w: w,
    "its elements share memory": lambda w: torch.zeros(1, H).expand(V, H),
    "its elements share memory; give": lambda w: torch.zeros(V + H).as_strided((V, H), (1, 1)),
    "it shares weight's memory": lambda w: w.data,
    "it was made in inference mode": lambda w: torch.inference_mode()(torch.zeros)(V, H),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument_and_the_problem(message):
    hidden, weight = inputs(torch.bfloat16)
    with pytest.raises(InvalidInputError, match="^weight_grad: " + message):
        value_of(hidden, weight, ERRORS[message](weight))


@pytest.mark.parametrize(
    "derive",
    [lambda w: w.t().contiguous().t(), lambda w: 2 * w, lambda w: w[:], lambda w: w.double().float()],
    ids=["transposed", "scaled", "a slice", "cast"],
)
def test_a_buffer_for_a_weight_that_is_not_the_parameter_itself(derive):
    """Autograd would get no gradient of the weight, and so the parameter behind it would get none either."""
    hidden, weight = inputs()
    with pytest.raises(InvalidInputError, match="weight_grad: got a buffer for a weight that is computed"):
        value_of(hidden, derive(weight), torch.zeros(V, H))
    for where in (torch.zeros(V, H), "dense"):  # nothing is lost where the parameter wants no gradient
        value_of(hidden, derive(weight.detach()), where).backward()
    value_of(hidden, derive(weight)).backward()
    assert weight.grad.any()


def test_a_buffer_in_the_hidden_states():
    memory = torch.zeros(2 * max(T, V), H)
    with pytest.raises(InvalidInputError, match="weight_grad: it shares hidden's memory"):
        value_of(memory[:T].requires_grad_(), draw(V, H).requires_grad_(), memory.detach()[T - 1 : T - 1 + V])
    hidden, weight = memory.detach()[:T].clone().requires_grad_(), draw(V, H).requires_grad_()
    value_of(
        hidden, weight, memory.detach()[1 : 2 * V : 2]
    ).backward()  # rows with a stride between them are valid too


def test_heads_without_a_width():
    weight = torch.zeros(V, 0)
    sets = random_sets(SIZES, V)
    got = score(torch.zeros(T, 0), weight, targets_of(sets), sets)
    sizes = torch.tensor(sets.sizes)
    torch.testing.assert_close(got.logprobs, -sizes.clamp(min=1).log())


def test_within_a_compiled_function():
    """Runs in a separate process, because the compiler crashes at exit if SGLang was imported."""
    run_in_subprocess(Path(__file__).parent / "torch_compile_cases.py", interpret=False)


def test_a_main_grad_that_is_to_be_overwritten():
    hidden, weight = inputs()
    weight.main_grad, weight.overwrite_main_grad = torch.zeros(V, H), True
    with pytest.raises(InvalidInputError, match=r"weight_grad: weight\.overwrite_main_grad is set"):
        value_of(hidden, weight, weight.main_grad)


def test_the_documented_lines():
    program = block_with("how-to/train.md", "weight_grad=")
    sets = random_sets(SIZES, V)
    hidden, weight = inputs()
    names = {"torch": torch, "score": score, "sets": sets}
    names |= {"weight": weight, "states": hidden, "targets": targets_of(sets)}
    for _ in range(2):
        exec(program, names)
        names["scores"].logprobs.sum().backward()
    dense_hidden, dense_weight = inputs()
    for _ in range(2):
        scores = score(dense_hidden, dense_weight, targets_of(sets), sets)
        scores.logprobs.sum().backward()
    assert torch.equal(weight.grad, dense_weight.grad)
