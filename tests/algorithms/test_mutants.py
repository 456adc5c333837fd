# SPDX-License-Identifier: Apache-2.0
"""Do the tests notice? One token of an algorithm, or of what makes a step of it, is changed at a time, and some unit
test has to fail.

Each mutant is tested in a process forked from this one, which has imported everything, in place of the module that it
changes. A mutant whose text is not in its file (any more) is an error: the list follows the code.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "whet"
CHANGEABLE = (
    "whet.algorithms.",
    "whet.plugins.proofs.",
    "whet.trainers.",
)  # imported again, with the mutant
DEADLINE_SECONDS = 200
COMMON = ["test_invariances.py", "../plugins/proofs/test_certify.py"]
TESTS = {  # where a module's own tests are; those that hold for all of a kind come after them
    "advantages": ["test_advantages.py", "test_agentic.py"],
    "statistics": ["test_statistics.py", "test_scan.py", "test_advantages.py"],
    "policy_losses": ["test_policy_losses.py", "test_more_policy_losses.py"],
    "correction": ["test_correction.py"],
    "aggregation": ["test_aggregation.py"],
    "kl": ["test_kl.py"],
    "value_loss": ["test_value_loss.py"],
    "shaping": ["test_shaping.py"],
    "filters": ["test_filters.py"],
    "cpo": ["test_cpo.py"],
    "trainers/shape": ["../trainers/test_loss_mask.py", "../trainers/test_controllers.py"],
    "trainers/objectives": ["../trainers/test_loss_mask.py", "../trainers/test_objectives.py"],
}
MUTANTS = [
    # signs, denominators, degrees of freedom
    ("advantages", "groups.size / (groups.size - 1)", "groups.size / (groups.size + 1)"),
    ("advantages", "groups.size / (groups.size - 1)", "(groups.size - 1) / (groups.size)"),
    ("advantages", "next_sampled(values, response_mask) - values", "next_sampled(values, response_mask) + values"),
    ("advantages", "gamma * next_sampled(", "next_sampled("),
    ("advantages", "response_mask, gamma * lam)", "response_mask, gamma)"),
    ("advantages", "else advantages), advantages + values", "else advantages), advantages - values"),
    ("advantages", "1.0 - 1.0 / (alpha * lengths)", "1.0 - 1.0 / lengths"),
    ("advantages", "lengths)).clamp(min=0.0)", "lengths)).clamp(min=-9.0)"),
    ("advantages", "response_mask, gamma * lam_critic) + values", "response_mask, gamma * by_length) + values"),
    ("advantages", "(whitened(returns, response_mask) if whiten else returns)", "whitened(returns, response_mask)"),
    ("advantages", "groups.normalised(scores, eps)", "groups.normalised(scores, 1e-6)"),
    ("statistics", ".gather(1, segment)", ".gather(1, segment.clamp(max=1))"),
    ("statistics", "starts = sampled & ~torch", "starts = sampled | ~torch"),
    ("statistics", "torch.where(sampled, decay[:, None], ones)", "decay[:, None].expand_as(ones)"),
    ("policy_losses", 'if level == "sequence" else segment_means', 'if level != "sequence" else segment_means'),
    ("correction", ".clamp(floor, cap)", ".clamp(0.0, cap)"),
    ("correction", 'if level not in ("token", "segment")', 'if level not in ("token",)'),
    ("correction", "masked_mean(weight.square(), response_mask) - 1.0", "masked_mean(weight, response_mask) - 1.0"),
    ("correction", '"perplexity_ratio": (-masked_mean', '"perplexity_ratio": (masked_mean'),
    ("correction", "(weight < low) | (weight > high)", "(weight < low) & (weight > high)"),
    ("shaping", "scale * (token_level_rewards + paid)", "scale * token_level_rewards + paid"),
    ("shaping", "torch.where(truncated[:, None], factor", "torch.where(~truncated[:, None], factor"),
    ("value_loss", "(returns - values)[sampled].var()", "returns[sampled].var()"),
    ("statistics", ".roll(-1)", ".roll(1)"),
    ("statistics", "following[lengths[lengths > 0].cumsum(0) - 1] = 0.0", "following[lengths.cumsum(0) - 1] = 0.0"),
    ("statistics", "masked_fill(sampled, decay)", "masked_fill(~sampled, decay)"),
    ("advantages", "eps) if std_norm else groups.deviation(scores)", "eps)"),
    ("advantages", "uid, std_norm=False)", "uid, std_norm=True)"),
    (
        "advantages",
        "return returns - reward_baselines[:, None], returns",
        "return returns + reward_baselines[:, None], returns",
    ),
    ("advantages", "groups.sum(lengths * scores) / groups.sum(lengths)", "groups.sum(scores) / groups.sum(lengths)"),
    ("advantages", "groups.member.sum() / counted.sum()", "counted.sum() / groups.member.sum()"),
    ("advantages", 'if count == "informative"', 'if count != "informative"'),
    ("advantages", "(groups.deviation(scores) / mean)", "(groups.deviation(scores) * mean)"),
    ("advantages", "masked_fill(mean <= 0, 0.0)", "masked_fill(mean < 0, 0.0)"),
    ("advantages", "if bool((scores < 0).any()):", "if bool((scores < -9).any()):"),
    ("advantages", "(batch.std(scores) + eps)", "(Groups(uid, response_mask).std(scores) + eps)"),
    ("advantages", "(accuracy >= 1.0)", "(accuracy > 0.0)"),
    ("advantages", "torch.where(alone, scores - second, 0.0)", "torch.where(alone, scores, 0.0)"),
    ("advantages", "(groups.sum(is_best) == 1)", "(groups.sum(is_best) >= 1)"),
    ("advantages", 'if over == "rows"', 'if over != "rows"'),
    ("advantages", "groups.member[:, None])[:, 0]", "torch.ones_like(groups.member)[:, None])[:, 0]"),
    ("advantages", "advantage + weight *", "advantage - weight *"),
    ("advantages", "1 - 2 * old_log_probs.exp() + sum_pi_squared", "1 - old_log_probs.exp() + sum_pi_squared"),
    ("advantages", "clamp(max=cap).square()", "clamp(max=cap)"),
    ("advantages", "total(sampled.double()) < 2", "total(sampled.double()) < 1"),
    ("advantages", "rate - 0.5, 0.0", "rate, 0.0"),
    ("advantages", "0.5 * draws.double()", "1.0 * draws.double()"),
    ("statistics", "(self.size - 1).clamp(min=1)).sqrt()", "self.size.clamp(min=1)).sqrt()"),
    ("statistics", "(mask.sum() - 1).clamp", "mask.sum().clamp"),
    ("statistics", "(variance + 1e-8)", "(variance + 1.0)"),
    ("statistics", "row_sums(x, mask) / mask.sum(-1)", "row_sums(x, mask) * mask.sum(-1)"),
    ("statistics", "torch.sub(x[rows], mean,", "torch.add(x[rows], mean,"),
    ("statistics", ".masked_fill(~self.member, 0.0).to(x.dtype)", ".to(x.dtype)"),
    ("statistics", "self._group[self.member], x[self.member].double()", "self._group, x.double()"),
    ("statistics", '"amax"', '"amin"'),
    ("advantages", "return reverse_scan(earned, has_turn, gamma), has_turn", "return earned, has_turn"),
    (
        "advantages",
        "episode_weight * episode[:, None] + step_weight",
        "episode_weight * episode[:, None] - step_weight",
    ),
    ("advantages", "uid[:, None].expand_as(states), states", "states, states"),
    ("advantages", "process_rewards - others[:, None]", "process_rewards + others[:, None]"),
    ("advantages", "(groups.sum(means) - means)", "groups.sum(means)"),
    ("value_loss", "(logit > 0) == (right > 0)", "(logit > 0) != (right > 0)"),
    ("value_loss", "logit = beta * row_sums", "logit = row_sums"),
    # clip sides, minima and maxima, what is detached
    ("policy_losses", "is_negative = advantages < 0", "is_negative = advantages > 0"),
    ("policy_losses", "ratio.clamp(1.0 - low, largest)", "ratio.clamp(1.0 + low, largest)"),
    ("policy_losses", "ratio.clamp(1.0 - low, largest)", "ratio.clamp(1.0 - low)"),
    ("policy_losses", "ratio.clamp(max=1.0 + high)", "ratio.clamp(min=1.0 + high)"),
    ("policy_losses", "ratio < 1.0 - low, (ratio", "ratio > 1.0 - low, (ratio"),
    ("policy_losses", "(advantages < 0) & (ratio > clip_ratio_c)", "(advantages > 0) & (ratio > clip_ratio_c)"),
    ("policy_losses", "return -advantages * bounded, {", "return advantages * bounded, {"),
    (
        "policy_losses",
        "means.clamp(max=10.0).exp() * (log_probs - log_probs.detach()).exp()",
        "means.clamp(max=10.0).exp()",
    ),
    ("policy_losses", "-advantages * ratio.clamp(max=delta)", "-advantages * ratio.clamp(min=delta)"),
    ("policy_losses", '"cap": (0.0, clip_ratio_high)', '"cap": (0.0, 1.0 + clip_ratio_high)'),
    (
        "policy_losses",
        "log_ratio(log_probs, old_log_probs).detach().exp()",
        "log_ratio(log_probs, old_log_probs).exp()",
    ),
    ("policy_losses", "pick(advantages > 0, tau_pos, tau_neg", "pick(advantages > 0, tau_neg, tau_pos"),
    ("policy_losses", "-4.0 * advantages / tau", "-4.0 * advantages * tau"),
    ("policy_losses", "moved.clamp(min=-clip_ratio_low)", "moved.clamp(max=-clip_ratio_low)"),
    ("policy_losses", "kept.masked_fill(advantages == 0, 0.0)", "kept.masked_fill(advantages == 0, 1.0)"),
    ("policy_losses", "-row_means(advantages, response_mask) * row", "-advantages.sum(-1) * row"),
    ("policy_losses", "(moved - target).square()", "(moved + target).square()"),
    ("policy_losses", "return -advantages * log_probs, {}", "return advantages * log_probs, {}"),
    ("policy_losses", "detach().clamp(max=1.0)\n", "detach().clamp(min=1.0)\n"),
    (
        "policy_losses",
        "torch.where(right, ratio.new_tensor(right_weight)",
        "torch.where(~right, ratio.new_tensor(right_weight)",
    ),
    (
        "policy_losses",
        "moved <= clip_ratio_high, moved >= -clip_ratio_low",
        "moved <= clip_ratio_high, moved >= clip_ratio_low",
    ),
    ("policy_losses", "p_old * (old_log_probs", "p * (old_log_probs"),
    ("policy_losses", "p <= p_old, p >= p_old", "p >= p_old, p <= p_old"),
    ("policy_losses", "0.5 * beta * penalty", "beta * penalty"),
    ("policy_losses", "(rate + k * log_w - rate * log_w.exp())", "(rate + k * log_w + rate * log_w.exp())"),
    ("policy_losses", "return weight * loss, {**diagnostics", "return loss, {**diagnostics"),
    ("policy_losses", "(covariance > lower) & (covariance < upper)", "(covariance > lower) & (covariance > upper)"),
    ("policy_losses", "torch.where(detached, loss.detach(), loss)", "torch.where(detached, loss, loss.detach())"),
    ("policy_losses", "covariance.flatten().topk(", "(-covariance).flatten().topk("),
    ("correction", "weight / masked_mean(*each)", "weight * masked_mean(*each)"),
    ("correction", "weight[:, :1], response_mask.sum(-1, keepdim=True) > 0", "weight, response_mask"),
    ("correction", "(weight >= low) & (weight <= high)", "(weight >= low) | (weight <= high)"),
    ("correction", '{"k1": -x,', '{"k1": x,'),
    ("correction", "x.expm1() - x}", "x.expm1() + x}"),
    (
        "correction",
        "row_means(rollout_log_probs - old_log_probs",
        "row_means(old_log_probs - rollout_log_probs",
    ),
    ("aggregation", "row_means(values, response_mask).sum()", "row_sums(values, response_mask).sum()"),
    ("aggregation", ".sum(), num_sequences) / fixed_length", ".sum(), num_sequences)"),
    (
        "aggregation",
        "row_sums(values, response_mask).sum(), num_tokens)",
        "row_sums(values, response_mask).sum(), num_sequences)",
    ),
    ("kl", "x = (ref_log_probs - log_probs)", "x = (log_probs - ref_log_probs)"),
    ("kl", "return 0.5 * (log_probs - ref_log_probs).square()", "return (log_probs - ref_log_probs).square()"),
    ("kl", "value.detach() + (other - other.detach())", "value + (other - other.detach())"),
    ("kl", "log_ratio(log_probs, old_log_probs).exp() * k3", "log_ratio(log_probs, old_log_probs).detach().exp() * k3"),
    ("kl", "log_ratio(log_probs, old_log_probs).exp() * k1", "log_ratio(log_probs, old_log_probs).exp() + k1"),
    ("statistics", "(log_probs - old_log_probs).clamp(-20.0, 20.0)", "(old_log_probs - log_probs).clamp(-20.0, 20.0)"),
    ("kl", "vocab_log_probs.exp() *", "ref_vocab_log_probs.exp() *"),
    ("kl", "(vocab_log_probs - ref_vocab_log_probs)", "(ref_vocab_log_probs - vocab_log_probs)"),
    ("kl", "masked_fill(outside, 0.0) - coef * penalty", "masked_fill(outside, 0.0) + coef * penalty"),
    ("trainers/shape", "kl / self.target - 1.0, -0.2), 0.2)", "kl / self.target, -0.2), 0.2)"),
    ("value_loss", "torch.maximum(losses, clipped_losses)", "torch.minimum(losses, clipped_losses)"),
    ("value_loss", "return 0.5 * losses", "return losses"),
    ("shaping", "clamp(max=0.0)", "clamp(min=0.0)"),
    ("shaping", "& (after == 1)", "& (after >= 1)"),
    ("shaping", "shifted - pay_on_last_token", "shifted + pay_on_last_token"),
    ("shaping", "apart * apart * self._count * len(scores) / total", "apart * self._count * len(scores) / total"),
    ("filters", "not all_alike(values)", "len(set(values)) > 1"),
    ("filters", "return low < mean < high and", "return low < mean and"),
    ("filters", "not alike(mean, low)", "mean != low"),
    ("filters", "not alike(mean, high)", "mean != high"),
    ("statistics", "~alike(self.max(x), -self.max(-x))", "(self.max(x) > -self.max(-x))"),
    ("statistics", "torch.where(self.differ(x) | ~self.member, mean, x.double())", "mean"),
    (
        "statistics",
        "torch.where(deviation == 0, deviation, deviation /",
        "torch.where(deviation > 1, deviation, deviation /",
    ),
    ("advantages", "alike(scores, best) & groups.member", "(scores == best) & groups.member"),
    ("advantages", "alike(scores, best) & differ", "(scores == best) & differ"),
    ("advantages", "draws = alike(scores[:, None], scores)", "draws = scores[:, None] == scores"),
    ("advantages", "~alike(scores, zero)", "(scores != 0)"),
    ("correction", "alike(scores, best) | alike(scores, worst)", "(scores == best) | (scores == worst)"),
    ("correction", "pick(alike(scores, best)", "pick(scores == best"),
    ("trainers/shape", "entropy < self.target", "entropy > self.target"),
    ("trainers/shape", "if self._is_low else 0.0", "if not self._is_low else 0.0"),
    ("cpo", "self.g - self.o", "self.o - self.g"),
    ("cpo", "wrapped.clamp(min=0.0), wrapped.clamp(max=0.0)", "wrapped.clamp(max=0.0), wrapped.clamp(min=0.0)"),
    ("cpo", "(share == 1).int() - (share == 0).int()", "(share == 0).int() - (share == 1).int()"),
    ("cpo", "(self.entropy - least) / span", "(self.most_entropy - self.entropy) / span"),
    ("cpo", "return self.g.exp() * self.k", "return self.o.exp() * self.k"),
    ("cpo", "t.mi * (1 + t.u), t.neg * t.mi * (2 - t.u)", "t.mi * (1 + t.u), t.neg * t.mi * (1 - t.u)"),
    ("cpo", "(t.most_entropy - t.entropy)", "(t.entropy)"),
    ("trainers/shape", "return batch.with_columns(loss_mask=kept", "return batch.with_columns(response_mask=kept"),
    ("trainers/shape", 'columns["response_mask"] = loss_mask(columns)', "pass"),
    ("trainers/shape", "weights.sum() / counted.sum()", "weights.sum() / len(counted)"),
    ("trainers/objectives", "torch.where(trained != 0, columns", "torch.where(trained == 0, columns"),
    ("trainers/objectives", "return counts(loss_mask(batch))", 'return counts(batch["response_mask"])'),
    ("trainers/objectives", "if result.aggregated is None:", "if result.aggregated is not None:"),
    ("trainers/objectives", 'rows if "response_mask" in', 'trained if "response_mask" in'),
    ("trainers/objectives", "trained.any(1, keepdim=True)", "trained.all(1, keepdim=True)"),
    ("trainers/objectives", 'moved = columns["old_log_probs"] -', 'moved = columns["old_log_probs"] +'),
    ("advantages", "return -coef * (old_log_probs", "return coef * (old_log_probs"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "old", "new"), MUTANTS, ids=lambda text: text[:40].strip())
def test_a_mutant_is_caught(module: str, old: str, new: str) -> None:
    assert _is_caught(module, old, new), f"no test of {module} notices {old!r} -> {new!r}"


def test_there_are_enough_and_the_list_follows_the_code() -> None:
    assert len(MUTANTS) >= 60
    times = {(module, old): _file(module).read_text().count(old) for module, old, _ in MUTANTS}
    assert {key: count for key, count in times.items() if count != 1} == {}


def _file(module: str) -> Path:
    return PACKAGE / (f"{module}.py" if "/" in module else f"algorithms/{module}.py")


def _is_caught(module: str, old: str, new: str) -> bool:
    source = _file(module).read_text()
    process = multiprocessing.get_context("fork").Process(target=_run, args=(module, source.replace(old, new)))
    process.start()
    process.join(DEADLINE_SECONDS)
    if process.is_alive():  # one that never ends is caught too
        process.kill()
        return True
    return process.exitcode != 0


def _run(module: str, source: str) -> None:
    """Replaces the real module by the changed one in the child, also in modules that have imported from it."""
    file = _file(module)
    package, name = f"whet.{file.parent.name}", f"whet.{file.parent.name}.{file.stem}"
    for each in [each for each in sys.modules if each.startswith(CHANGEABLE)]:
        del sys.modules[each]
    for each in [each for each, found in sys.modules.items() if _is_test(found)]:
        del sys.modules[each]
    _clear_registries()
    changed = ModuleType(name)
    changed.__file__ = str(file)
    sys.modules[name] = changed
    exec(compile(source, changed.__file__, "exec"), changed.__dict__)
    setattr(importlib.import_module(package), file.stem, changed)
    code = 0
    own, common = TESTS[module], COMMON  # the own tests first: reading all tests takes longer than running these
    for names, kind in ((own, "not slow"), (common, "not slow"), (common, "slow")):
        if code == 0:
            files = [str(HERE / name) for name in names]
            with contextlib.redirect_stdout(io.StringIO()):
                code = int(pytest.main(["-x", "-q", "-m", kind, "-p", "no:cacheprovider", "-p", "no:randomly", *files]))
    sys.exit(code)


def _is_test(module: ModuleType) -> bool:
    """Tells whether a module is one of the tests beside this file, which keep their imports under any name."""
    file = getattr(module, "__file__", None)
    places = (HERE, HERE.parent / "trainers")
    return file is not None and Path(file).parent in places and Path(file).name.startswith("test_")


def _clear_registries() -> None:
    """Forgets the registrations of this process, as the modules are imported again."""
    from whet.registry import KINDS

    for kind in KINDS:
        kind._live.clear()
