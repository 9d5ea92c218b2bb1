"""The loss against a scalar loop written from its equations, in value and in gradient."""

import math
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
import torch

import grpo_engine as ge

CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
LOSSES = [
    *((loss, "token") for loss in [*CLIPPED, "cispo", "sapo", "vespo"]),
    *((loss, "sequence") for loss in CLIPPED),
]
NO_STOPPED_GRADIENT = [x for x in LOSSES if x[0] not in ("cispo", "vespo")]
KLS = [None, *product(["k1", "k2", "k3"], [False, True])]
BOUND, LOWEST_W = 20.0, math.log(1e-8)

# Four groups of two; an empty completion, one of a single token, one that is not in the loss.
LENGTHS = [4, 1, 0, 6, 3, 5, 2, 4]
IN_LOSS = [True, True, True, True, False, True, True, True]
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5, 0.5]
ADVANTAGES = [0.9, -0.8, 1.0, -1.1, 0.7, 1.3, -0.4, 0.0]
DRIFT = [-0.5, 0.6, 0.0, 0.5, 0.2, 0.5, -1.0, 0.0]  # of old from logp, beyond the clip ranges
CU_SEQLENS = [0, *accumulate(LENGTHS)]
N = CU_SEQLENS[-1]


def make_options(loss, level="token", kl=None, **changes):
    fields = {"loss_type": loss, "importance_sampling_level": level, "beta": 0.0}
    fields["epsilon_high"] = 1.5 if loss == "cispo" else 0.3
    fields["max_completion_length"] = 9 if loss == "dr_grpo" else None
    if kl is not None:
        fields |= {"beta": 0.3, "kl_estimator": kl[0], "use_bias_correction_kl": kl[1]}
    return ge.GRPOOptions(**{**fields, **changes})


def make_tokens(seed=0):
    """logp, old, ref, importance ratio and mask, all [N]."""
    rng = np.random.default_rng(seed)
    logp = -rng.gamma(2.0, 0.7, N)
    old = logp + np.repeat(DRIFT, LENGTHS) + rng.normal(0, 0.3, N)
    ref = logp + rng.normal(0, 0.5, N)
    return logp, old, ref, rng.uniform(0.6, 1.4, N), rng.random(N) < 0.8


def clamp(x, low, high):
    return min(max(x, low), high)


def policy_terms(o, tokens, logp, frozen, old, a, c):
    """The policy term of each token of one sample; stopped gradients are taken at `frozen`."""
    d = [clamp(logp[t] - old[t], -BOUND, BOUND) for t in tokens]
    stopped = [clamp(frozen[t] - old[t], -BOUND, BOUND) for t in tokens]
    log_w = sum(stopped) + (0.0 if c is None else sum(math.log(c[t]) for t in tokens))
    log_w = clamp(log_w, LOWEST_W, BOUND)
    terms = []
    for t, d_t, stopped_t in zip(tokens, d, stopped, strict=True):
        sequence = o.importance_sampling_level == "sequence"
        rho = math.exp(sum(d) / len(d) if sequence else d_t)
        if o.loss_type == "cispo":
            term = -min(math.exp(stopped_t), o.epsilon_high) * a[t] * logp[t]
        elif o.loss_type == "sapo":
            tau = o.sapo_temperature_pos if a[t] > 0 else o.sapo_temperature_neg
            term = -a[t] * 4 / tau / (1 + math.exp(-tau * (rho - 1)))
        elif o.loss_type == "vespo":
            k, lam = (o.vespo_k_pos, o.vespo_lambda_pos)
            if a[t] < 0:
                k, lam = (o.vespo_k_neg, o.vespo_lambda_neg)
            term = -math.exp(lam + k * log_w - lam * math.exp(log_w)) * a[t] * logp[t]
        else:
            high = o.epsilon if o.epsilon_high is None else o.epsilon_high
            rho1 = rho if o.delta is None else min(rho, o.delta)
            term = -min(rho1 * a[t], clamp(rho, 1 - o.epsilon, 1 + high) * a[t])
        terms.append(term if c is None or o.loss_type == "vespo" else term * c[t])
    return terms


def kl_term(o, logp, old, ref):
    x = clamp(ref - logp, -BOUND, BOUND)
    kl = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}[o.kl_estimator]
    return kl * math.exp(clamp(logp - old, -BOUND, BOUND)) if o.use_bias_correction_kl else kl


def scalar_loss(o, logp, frozen, old, ref, a, mask, c=None):
    """The equations, one token at a time. `frozen`: logp as a constant; a: [N], one per token."""
    old = frozen if old is None else old
    total, samples, n_tokens = 0.0, 0, 0
    for (start, end), in_loss in zip(pairwise(CU_SEQLENS), IN_LOSS, strict=True):
        if not in_loss:
            continue
        tokens = [t for t in range(start, end) if mask[t]]
        terms = policy_terms(o, tokens, logp, frozen, old, a, c)
        if o.beta:
            kl = [kl_term(o, logp[t], old[t], ref[t]) for t in tokens]
            terms = [l + o.beta * k for l, k in zip(terms, kl, strict=True)]  # noqa: E741
        samples, n_tokens = samples + 1, n_tokens + len(tokens)
        total += sum(terms) / (max(len(tokens), 1) if o.loss_type in ("grpo", "sapo") else 1)
    if o.loss_type in ("grpo", "sapo", "luspo"):
        return total / samples
    if o.loss_type == "dr_grpo":
        return total / (samples * o.max_completion_length)
    return total / n_tokens


def scalar_gradient(o, logp, *rest, h=1e-6, **kw):
    """Central differences of `scalar_loss`, stopped gradients held where they are."""
    gradient = np.zeros(N)
    for t in range(N):
        up, down = logp.copy(), logp.copy()
        up[t], down[t] = up[t] + h, down[t] - h
        high, low = (scalar_loss(o, x, logp, *rest, **kw) for x in (up, down))
        gradient[t] = (high - low) / (2 * h)
    return gradient


def engine(o, logp, old, ref, advantages, mask, c=None, **kw):
    """Value and gradient of `ge.grpo_loss` on packed float64 tokens."""
    logp, old, ref, advantages, c = (
        None if x is None else torch.tensor(np.asarray(x), dtype=torch.float64)
        for x in (logp, old, ref, advantages, c)
    )
    logp.requires_grad_()
    out = ge.grpo_loss(
        logp,
        old,
        ref,
        advantages=advantages,
        cu_seqlens=torch.tensor(CU_SEQLENS, dtype=torch.int32),
        in_loss=torch.tensor(IN_LOSS),
        mask=torch.tensor(mask),
        importance_ratio=c,
        options=o,
        impl="torch",
        **kw,
    )
    out.loss.backward()
    return out, logp.grad.numpy()


def assert_matches_the_loop(o, c=None, old_is_logp=False, per_token=False, seed=0):
    logp, old, ref, ratio, mask = make_tokens(seed)
    c, old = (ratio if c else None), (None if old_is_logp else old)
    a = np.repeat(ADVANTAGES, LENGTHS)
    if per_token:
        a = np.random.default_rng(seed).normal(size=N)
    out, gradient = engine(o, logp, old, ref, a if per_token else ADVANTAGES, mask, c)
    assert out.loss.item() == pytest.approx(
        scalar_loss(o, logp, logp, old, ref, a, mask, c), rel=1e-12
    )
    expected = scalar_gradient(o, logp, old, ref, a, mask, c=c)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)
    assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_every_loss_and_kl_matches_a_scalar_loop(loss, level, kl):
    assert_matches_the_loop(make_options(loss, level, kl))


@pytest.mark.parametrize("kl", [None, ("k3", True)])
@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_importance_ratio_matches_a_scalar_loop(loss, level, kl):
    assert_matches_the_loop(make_options(loss, level, kl), c=True, seed=1)


@pytest.mark.parametrize(("loss", "level"), [x for x in LOSSES if x[0] in CLIPPED])
def test_two_sided_clip_matches_a_scalar_loop(loss, level):
    assert_matches_the_loop(make_options(loss, level, ("k2", False), delta=1.05), seed=2)
    assert_matches_the_loop(make_options(loss, level, delta=1.7, epsilon_high=None), c=True, seed=2)


@pytest.mark.parametrize("kl", [None, ("k1", True)])
@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_on_policy_matches_a_scalar_loop(loss, level, kl):
    assert_matches_the_loop(make_options(loss, level, kl), c=True, old_is_logp=True, seed=3)


@pytest.mark.parametrize(("loss", "level"), [x for x in LOSSES if x[0] != "vespo"])
def test_advantages_per_token_match_a_scalar_loop(loss, level):
    assert_matches_the_loop(make_options(loss, level, ("k3", False)), per_token=True, seed=4)


def test_constants_of_sapo_and_vespo_match_a_scalar_loop():
    taus = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0}
    assert_matches_the_loop(make_options("sapo", **taus))
    constants = {"k_pos": 1.5, "lambda_pos": 0.5, "k_neg": 0.8, "lambda_neg": 1.2}
    constants = {f"vespo_{name}": value for name, value in constants.items()}
    assert_matches_the_loop(make_options("vespo", **constants), c=True)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_tokens_of_these_tests_lie_beyond_both_clips_and_delta(level):
    logp, old, ref, _, mask = make_tokens(2)
    plain, _ = engine(make_options("grpo", level), logp, old, ref, ADVANTAGES, mask)
    capped, _ = engine(make_options("grpo", level, delta=1.7), logp, old, ref, ADVANTAGES, mask)
    assert plain.metrics["clip_low"] > 0 and plain.metrics["clip_high"] > 0
    assert plain.metrics["clip_region"] < 0.7
    assert plain.loss - capped.loss > 0.01


@pytest.mark.parametrize("kl", [("k1", False), ("k2", True), ("k3", True)])
@pytest.mark.parametrize(("loss", "level"), NO_STOPPED_GRADIENT)
def test_gradient_passes_gradcheck(loss, level, kl):
    logp, old, ref, ratio, mask = map(torch.tensor, make_tokens(5))
    kw = {"mask": mask, "importance_ratio": ratio, "options": make_options(loss, level, kl)}
    kw["advantages"] = torch.tensor(ADVANTAGES, dtype=torch.float64)
    kw["cu_seqlens"] = torch.tensor(CU_SEQLENS, dtype=torch.int32)

    def value(x):
        return ge.grpo_loss(x, old, ref, impl="torch", **kw).loss

    assert torch.autograd.gradcheck(value, logp.requires_grad_())


@pytest.mark.parametrize("kl", [None, ("k3", True)])
@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_no_old_log_probs_equals_the_detached_policy(loss, level, kl):
    logp, _, ref, ratio, mask = make_tokens(6)
    o = make_options(loss, level, kl)
    without, gradient = engine(o, logp, None, ref, ADVANTAGES, mask, ratio)
    given, expected = engine(o, logp, logp, ref, ADVANTAGES, mask, ratio)
    assert without.loss.item() == given.loss.item()
    assert np.array_equal(gradient, expected)
    assert without.metrics["ratio_min"] == without.metrics["ratio_max"] == 1


def pad(x, garbage):
    """Packed [N] -> [S, T] with `garbage` in the padding."""
    padded = torch.full((len(LENGTHS), max(LENGTHS)), garbage, dtype=x.dtype)
    for i, (start, end) in enumerate(pairwise(CU_SEQLENS)):
        padded[i, : end - start] = x[start:end]
    return padded


@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_padded_equals_packed_in_value_gradient_and_metrics(loss, level):
    logp, old, ref, ratio, mask = map(torch.tensor, make_tokens(7))
    kw = {"rewards": torch.tensor(REWARDS), "in_loss": torch.tensor(IN_LOSS), "impl": "torch"}
    kw |= {"cu_groups": torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32)}
    kw |= {"options": make_options(loss, level, ("k3", True))}
    cu = torch.tensor(CU_SEQLENS, dtype=torch.int32)

    logp.requires_grad_()
    packed = ge.grpo_loss(logp, old, ref, cu_seqlens=cu, mask=mask, importance_ratio=ratio, **kw)
    packed.loss.backward()
    wide = pad(logp.detach(), -200.0).requires_grad_()
    padded = ge.grpo_loss(
        wide,
        pad(old, 0.0),
        pad(ref, -math.inf),
        mask=pad(mask, False),
        importance_ratio=pad(ratio, math.nan),
        **kw,
    )
    padded.loss.backward()
    assert padded.loss.item() == pytest.approx(packed.loss.item(), rel=1e-12)
    torch.testing.assert_close(wide.grad, pad(logp.grad, 0.0), rtol=1e-12, atol=0)
    assert padded.metrics.keys() == packed.metrics.keys()
    for name, value in packed.metrics.items():
        assert padded.metrics[name].item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("cuts", "number"),
    [([0, 8], float), ([0, 2, 4, 6, 8], torch.tensor), ([0, 3, 4, 5, 8], float)],
)
@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_any_split_into_micro_batches_accumulates_to_the_same_gradient(loss, level, cuts, number):
    logp, old, ref, ratio, mask = make_tokens(8)
    o = make_options(loss, level, ("k3", False))
    whole, expected = engine(o, logp, old, ref, ADVANTAGES, mask, ratio)

    samples = sum(IN_LOSS)
    tokens = int((np.repeat(IN_LOSS, LENGTHS) & mask).sum())
    default = {"grpo": samples, "sapo": samples, "luspo": samples, "dr_grpo": 9 * samples}
    leaf = torch.tensor(logp, requires_grad=True)
    total = 0.0
    for first, last in pairwise(cuts):
        cu = torch.tensor(CU_SEQLENS[first : last + 1], dtype=torch.int32)
        cut = slice(cu[0], cu[-1])
        part = ge.grpo_loss(
            leaf[cut],
            *(torch.tensor(x[cut]) for x in (old, ref)),
            advantages=torch.tensor(ADVANTAGES[first:last], dtype=torch.float64),
            cu_seqlens=cu - cu[0],
            in_loss=torch.tensor(IN_LOSS[first:last]),
            mask=torch.tensor(mask[cut]),
            importance_ratio=torch.tensor(ratio[cut]),
            normalizer=number(default.get(loss, tokens)),
            options=o,
            impl="torch",
        ).loss
        part.backward()
        total += part.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-12)
    np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=1e-12, atol=1e-15)
