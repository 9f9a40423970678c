"""Benchmark of full-vocabulary log-probs from hidden states: `score` against other packages.

The benchmark measures every package that is installed and runs on this machine. The last contender scores
over candidate sets, which no other package can. To measure every contender, install `trl`,
`cut-cross-entropy`, and `liger-kernel`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.paired_timing import compare
from benchmarks.replay import make_sets
from sglang_topp.replay import score

__all__ = ["run"]


def run() -> None:
    """Time each package's forward and backward pass."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    t, h, v = (8192, 4096, 151_936) if device == "cuda" else (1024, 512, 16_384)
    torch.manual_seed(0)
    hidden = torch.randn(t, h, dtype=dtype, device=device).requires_grad_()
    weight = (0.02 * torch.randn(v, h, dtype=dtype, device=device)).requires_grad_()
    sets = make_sets(t, v)
    targets = torch.tensor(sets.sampled_ids, dtype=torch.int64, device=device)

    def full_logits() -> Tensor:
        return torch.log_softmax((hidden @ weight.t()).float(), dim=1).gather(1, targets[:, None])

    contenders: dict[str, Callable[[], Tensor]] = {"torch: full logits, log-softmax": full_logits}
    for name, make in (("trl", _trl), ("cut-cross-entropy", _cut_cross_entropy), ("liger-kernel", _liger)):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: not installed")
            continue
        label, contender = make(hidden, weight, targets)
        try:
            errors = contender().detach().flatten() - full_logits().detach().flatten()
        except RuntimeError as problem:
            print(f"{name} {version}: does not run here ({problem})")
            continue
        print(f"{name} {version}: differs from torch by at most {float(errors.abs().max()):.1e}")
        contenders[f"{name}: {label}"] = contender
    contenders["score without sets"] = lambda: score(hidden, weight, targets).logprobs
    contenders["score (over the candidates)"] = lambda: score(hidden, weight, targets, sets).logprobs

    def forward_backward(function: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            hidden.grad = weight.grad = None
            function().sum().backward()
            if hidden.is_cuda:
                torch.cuda.synchronize()

        return call

    compare(
        f"log-probs from hidden states, forward + backward; {device}, {dtype}, T = {t}, H = {h}, V = {v}",
        {label: forward_backward(function) for label, function in contenders.items()},
        rounds=5,
        warmup=2,
    )


# A contender's label, and the function to time.
Contender = tuple[str, Callable[[], Tensor]]


def _trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Contender:
    from trl.trainer.utils import selective_log_softmax

    return "full logits, selective_log_softmax", lambda: selective_log_softmax(hidden @ weight.t(), targets)


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Contender:
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if hidden.is_cuda else "torch_compile"
    return impl, lambda: -linear_cross_entropy(hidden, weight, targets, reduction="none", impl=impl)


def _liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Contender:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def call() -> Tensor:
        loss = liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")
        return -(loss[0] if isinstance(loss, tuple) else loss)

    return "fused_linear_cross_entropy", call


if __name__ == "__main__":
    run()
