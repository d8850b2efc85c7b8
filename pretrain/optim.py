"""Learning-rate schedules, the LAMB and Muon optimizers, the assignment of parameters to
optimizers, and their update."""

from functools import partial
from math import cos, pi

import torch
from torch import Tensor, nn

from pretrain.config import TrainConfig
from pretrain.sharding import local_part, share_matrices


def learning_rate(step: int, train: TrainConfig) -> float:
    """Compute the learning rate of an update: linear warm-up, then the decay of `schedule`.

    step: 0 is the first update.
    The decay starts where the warm-up ends, so the rate is continuous, and reaches 0 at
    `max_steps`. A function of the step has no state to save, unlike a scheduler, which Accelerate
    would also step once per process.
    """
    top, warmup = train.learning_rate, train.warmup_steps
    if step < warmup:
        return top * (step + 1) / warmup
    left, decay = train.max_steps - step, train.max_steps - warmup
    if train.schedule == "cosine":
        return top * (1 - cos(pi * left / decay)) / 2
    if train.schedule == "polynomial":
        return top * (left / decay) ** train.decay_power
    if train.schedule == "trapezoid":
        decay = train.decay_steps
    return top * min(left, decay) / decay


class Lamb(torch.optim.Optimizer):
    """LAMB for large batches (You et al. 2020, arXiv:1904.00962, algorithm 2).

    Scales AdamW's update of each parameter w, weight decay included, by the trust ratio
    ||w|| / ||update||. The ratio is 1 where either norm is 0 and, as in NVIDIA's FusedLAMB, for
    groups without weight decay (biases and norms). The state of a parameter is `step`, `exp_avg`
    and `exp_avg_sq`, all tensors, as in AdamW.
    """

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if weights:
                self.update(weights, **group)

    # torch._foreach_*: private, but torch.optim itself uses them, and there is no public way to
    # update a list of tensors in one kernel
    def update(self, weights: list[Tensor], lr, betas, eps, weight_decay, **_) -> None:
        """Update the parameters of one group."""
        for p in weights:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), device=p.device)
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        steps, means, squares = (
            [self.state[p][name] for p in weights] for name in ("step", "exp_avg", "exp_avg_sq")
        )
        grads = [p.grad for p in weights]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, grads, 1 - betas[0])
        torch._foreach_mul_(squares, betas[1])
        torch._foreach_addcmul_(squares, grads, grads, 1 - betas[1])
        # correct the bias of both moments towards their initial zeros; pair heads may be younger
        ages = torch.stack(steps).double()
        bias1, bias2 = ((1 - beta**ages).float().unbind() for beta in betas)
        updates, roots = torch._foreach_div(means, bias1), torch._foreach_div(squares, bias2)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, eps)
        torch._foreach_div_(updates, roots)
        if weight_decay:
            torch._foreach_add_(updates, weights, alpha=weight_decay)
            w, u = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, updates))
            ratios = torch.where((w > 0) & (u > 0), w / u, 1.0)
            torch._foreach_mul_(updates, ratios.unbind())
        torch._foreach_add_(weights, updates, alpha=-lr)


class Muon(torch.optim.Muon):
    """Muon that orthogonalizes all matrices of one shape together, and shares them among processes.

    torch's own takes one matrix after the other: 23 launches each, which a GPU waits for, and under
    FSDP2 a gather for almost every operation. The result is the same, on a CPU to the bit.
    Updates have the root mean square of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that one
    learning rate serves both.

    dtype: to orthogonalize in; torch's own supports only bf16, which runs at a quarter of float32's
    speed on a CPU without bf16 instructions.
    """

    def __init__(self, matrices: list[Tensor], lr: float, weight_decay: float, dtype: torch.dtype):
        super().__init__(matrices, lr, weight_decay)
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shapes: dict[tuple, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for weights in shapes.values():
                self.update(weights, **group)

    def update(self, weights: list[Tensor], lr, weight_decay, momentum, **options) -> None:
        """Update matrices of one shape."""
        for p in weights:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        means = [local_part(self.state[p]["momentum_buffer"]) for p in weights]
        grads = [local_part(p.grad) for p in weights]
        torch._foreach_lerp_(means, grads, 1 - momentum)
        ahead = torch.stack(torch._foreach_lerp(grads, means, momentum))  # Nesterov's
        settings = options["ns_coefficients"], options["ns_steps"], options["eps"]
        updates = share_matrices(
            lambda some: orthogonalize(some, *settings), ahead.to(self.dtype), weights[0]
        )
        rate = lr * (0.2 * max(weights[0].shape) ** 0.5)
        weights = [local_part(p) for p in weights]
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, updates.to(weights[0].dtype).unbind(), alpha=-rate)


def orthogonalize(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Bring the singular values of each matrix near 1, by Newton and Schulz's iteration.

    matrices: (N, A, B).
    coefficients: of x, x^3 and x^5, the function of a singular value x in each step.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    if len(x):
        norms = torch.stack(torch._foreach_norm(x.unbind()))
        x = x / norms.clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()


def build_optimizers(
    model: nn.Module, train: TrainConfig, dtype: torch.dtype = torch.bfloat16
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of all trainable parameters.

    dtype: of matrix products, in which Muon orthogonalizes.
    Returns [AdamW], [LAMB], or [Muon, AdamW], where Muon has the matrices of the encoder layers.
    One-dimensional parameters (biases and norms) have no weight decay, as in BERT.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizers = []
    if train.optimizer == "muon":
        matrices = [p for x in model.all_layers() for p in x.parameters() if p.dim() == 2]
        taken = set(map(id, matrices))
        parameters = [p for p in parameters if id(p) not in taken]
        optimizers.append(Muon(matrices, train.learning_rate, train.weight_decay, dtype))
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    rest = Lamb if train.optimizer == "lamb" else partial(torch.optim.AdamW, fused=True)
    betas = (train.adam_beta1, train.adam_beta2)
    optimizers.append(rest(groups, lr=train.learning_rate, betas=betas, eps=train.adam_epsilon))
    return optimizers


def zero_gradients(optimizers: list[torch.optim.Optimizer]) -> None:
    """Free all gradients."""
    for optimizer in optimizers:
        optimizer.zero_grad()


def update(
    optimizers: list[torch.optim.Optimizer], rate: float, found: torch.Tensor | None = None
) -> None:
    """Update the parameters at learning rate `rate`, unless the gradient norm is not finite.

    found: from `agree_on_step`; its first number is the norm. On a GPU, AdamW reads it there, so
    the host does not wait. For the other optimizers the host waits before the update.
    """
    if found is not None and skips_there(optimizers, found.device.type):
        for optimizer in optimizers:  # as torch's gradient scaler does
            optimizer.found_inf = found[0].isfinite().logical_not().float()
    elif found is not None and not found[0].isfinite():
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def skips_there(optimizers: list[torch.optim.Optimizer], device: str) -> bool:
    """Tell whether the optimizers can skip an update by themselves, as fused AdamW does."""
    return device != "cpu" and all(isinstance(one, torch.optim.AdamW) for one in optimizers)
