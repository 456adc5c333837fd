# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies of sampled tokens, from hidden states. Logits are computed in chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from whet.devices import runs_triton

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


class LogitForm(NamedTuple):
    """The form of logits, from z = hidden weight^T + bias: scale z, or with a cap, cap tanh(scale z / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitForm:
        """Reads scale (Cohere, Granite, Falcon-H1) and cap (Gemma, RecurrentGemma, xLSTM) from a text config."""
        scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        scale *= getattr(config, "lm_head_multiplier", 1.0)
        return cls(scale, next(filter(None, (getattr(config, name, None) for name in CAPS)), None))

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """Maps z to logits, elementwise."""
        if self.cap is not None:
            return (z * (self.scale / self.cap)).tanh() * self.cap
        return z if self.scale == 1.0 else z * self.scale

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Returns the derivative d logits / d z, computed from the logits."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap).square())


class TokenStatistics(NamedTuple):
    """Statistics of N tokens. A field that was not requested is None."""

    log_probs: torch.Tensor  # [N] log_softmax(logits / temperature) at the target
    entropy: torch.Tensor | None  # [N] of softmax(logits / temperature)
    sum_pi_squared: torch.Tensor | None  # [N] sum_v pi_v^2, without gradient


def token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    form: LogitForm = LogitForm(),  # noqa: B008  # immutable
    fixed: bool = False,
) -> TokenStatistics:
    """Computes statistics of `targets` [N] under softmax(form(hidden weight^T + bias) / temperature).

    hidden [N, H], weight [V, H], bias [V]. At most `chunk_tokens` rows of logits [., V] exist at once; the backward
    pass computes them again. Matrix products run in hidden's dtype, the rest in at least float32. Temperature 0
    (greedy) counts as 1. `fixed` uses `batch_invariant_triton`: a token's results do not depend on the other tokens."""
    log_probs, entropies, squares = _TokenStatistics.apply(
        hidden, weight, bias, targets, temperature or 1.0, chunk_tokens, entropy, sum_pi_squared, form, fixed
    )
    return TokenStatistics(log_probs, entropies if entropy else None, squares if sum_pi_squared else None)


def vocab_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float = 1.0,
    form: LogitForm = LogitForm(),  # noqa: B008
) -> torch.Tensor:
    """Computes log_softmax(form(hidden weight^T + bias) / temperature): [N, H], [V, H], [V] -> [N, V]."""
    typed_bias = None if bias is None else bias.to(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _logits(hidden, weight.to(hidden.dtype), typed_bias, temperature or 1.0, form).log_softmax(-1)


def _products(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fixed: bool = False
) -> torch.Tensor:
    if fixed:
        from whet.kernels import batch_invariant_triton

        return batch_invariant_triton.product(hidden, weight, bias)
    products = hidden @ weight.T
    return products if bias is None else products + bias


def _of_chunk(
    at: slice, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Selects a chunk of both gradients. If missing, the gradient of log-probs is 0, and that of entropies is None."""
    if grad_log_probs is None:
        own = torch.zeros(len(like), dtype=torch.float32, device=like.device)
    else:
        own = grad_log_probs[at].float().contiguous()
    return own, None if grad_entropy is None else grad_entropy[at].float().contiguous()


def _kernels(hidden: torch.Tensor, fixed: bool) -> Any:
    """Returns the module of Triton kernels; None if they cannot run on `hidden`. (float32 uses torch.)"""
    otherwise = "log-probs take several passes over the logits"
    if not fixed and (hidden.dtype != torch.bfloat16 or not runs_triton(hidden.device, otherwise)):
        return None
    from whet.kernels import log_probs_triton

    return log_probs_triton


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float, form: LogitForm
) -> torch.Tensor:
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = form(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    return logits if temperature == 1.0 else logits / temperature


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden, weight, bias, targets, temperature, chunk_tokens, entropy, sum_pi_squared, form, fixed
    ):
        typed_weight, typed_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        results: list[torch.Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for part, target in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
                if kernels := _kernels(hidden, fixed):
                    products = _products(part, typed_weight, typed_bias, fixed)
                    results.append(kernels.statistics(products, target, form.scale, form.cap or 0.0, temperature))
                    continue
                logits = _logits(part, typed_weight, typed_bias, temperature, form)
                log_sum = logits.logsumexp(-1)
                chosen = logits.gather(-1, target[:, None]).squeeze(-1) - log_sum
                none = torch.zeros_like(chosen)
                pi = (logits - log_sum[:, None]).exp() if entropy or sum_pi_squared else logits
                disorder = log_sum - (pi * logits).sum(-1) if entropy else none
                squares = pi.square().sum(-1) if sum_pi_squared else none
                results.append(torch.stack([chosen, disorder, squares, log_sum]))
        log_probs, entropies, squared, log_sums = torch.cat(results, dim=1).unbind(0)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropies)
        ctx.temperature, ctx.chunk_tokens, ctx.form, ctx.fixed = temperature, chunk_tokens, form, fixed
        ctx.mark_non_differentiable(squared)
        ctx.set_materialize_grads(False)  # the gradient of an unused result is None, and costs nothing
        return log_probs, entropies, squared

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, _):  # type: ignore[no-untyped-def]
        """d log pi_y / d l = onehot(y) - pi;   d H / d l = -pi (log pi + H);   l = logits / temperature."""
        hidden, weight, bias, targets, log_sums, entropies = ctx.saved_tensors
        typed_weight, typed_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        # A frozen head needs no gradient. Chunks are summed in at least float32.
        grad_weight = _wide_zeros(weight) if ctx.needs_input_grad[1] else None
        grad_bias = _wide_zeros(bias) if ctx.needs_input_grad[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), ctx.chunk_tokens):
                at = slice(start, start + ctx.chunk_tokens)
                if kernels := _kernels(hidden, ctx.fixed):
                    products = _products(hidden[at], typed_weight, typed_bias, ctx.fixed)
                    given = (
                        targets[at],
                        log_sums[at],
                        entropies[at],
                        *_of_chunk(at, grad_log_probs, grad_entropy, products),
                    )
                    form = ctx.form.scale, ctx.form.cap or 0.0, ctx.temperature
                    grad = kernels.gradient_(products, *given, *form)
                    grad_hidden[at] = grad @ typed_weight
                    if grad_weight is not None and hidden.is_cuda:  # the product adds to the sum in float32
                        torch.addmm(grad_weight, grad.T, hidden[at], out_dtype=torch.float32, out=grad_weight)
                    elif grad_weight is not None:
                        grad_weight += grad.T @ hidden[at]
                    if grad_bias is not None:
                        grad_bias += grad.sum(0, dtype=torch.float32)
                    continue
                logits = _logits(hidden[at], typed_weight, typed_bias, ctx.temperature, ctx.form)
                log_pi = logits - log_sums[at, None]
                pi = log_pi.exp()
                grad = torch.zeros_like(pi)
                if grad_log_probs is not None:
                    grad = pi * -grad_log_probs[at, None]
                    grad.scatter_add_(1, targets[at, None], grad_log_probs[at, None].to(grad.dtype))
                if grad_entropy is not None:
                    grad -= pi * (log_pi + entropies[at, None]) * grad_entropy[at, None]
                if ctx.form != LogitForm():
                    grad *= ctx.form.slope(logits * ctx.temperature)
                grad = (grad if ctx.temperature == 1.0 else grad / ctx.temperature).to(hidden.dtype)
                grad_hidden[at] = grad @ typed_weight
                if grad_weight is not None:
                    grad_weight += grad.T @ hidden[at]
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None, None


def _wide_zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
