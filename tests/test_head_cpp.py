"""Log-probs from hidden states by the C++ row passes, against the reference in float64."""

import math
from itertools import product

import pytest
import torch

import grpo_engine as ge
from grpo_engine import _C
from grpo_engine.kernels import token_logprob as tiled

INF = math.inf
SETS = ["plain", "avx2", "avx512"]
ISAS = SETS[: SETS.index(_C.best_isa()) + 1]
# Log-prob and entropy in nats; gradients by norm: half precision rounds p and the result once each.
NATS = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-4}
SHARE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
DTYPES = list(NATS)
ALL = ("hidden", "weight", "bias")
PATHS = {"scored": (), "frozen": ("hidden",), "trained": ("hidden", "weight")}
# Around a block of 256 columns; one that the GEMM takes in four parts, none a multiple of another.
WIDTHS = [1, 7, 255, 256, 257, 1000, 32003]


@pytest.fixture(params=ISAS)
def isa(request):
    _C.use_isa(request.param)
    yield
    _C.use_isa(_C.best_isa())


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty is full of NaN: what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_head(rows, columns, dtype=torch.float32, width=16, std=2.0, seed=0, **options):
    """Arguments of token_logprob; the logits have this standard deviation."""
    g = torch.manual_seed(seed)
    case = {
        "hidden": torch.randn(rows, width, generator=g).to(dtype),
        "weight": (torch.randn(columns, width, generator=g) * std / width**0.5).to(dtype),
        "targets": torch.randint(0, columns, (rows,), generator=g),
    }
    return case | options


def upstream(rows):
    return torch.linspace(-1.0, 2.3, rows)


def score(case, wanted=(), impl="cpp"):
    """logp, entropy, and the gradients of what is wanted for an uneven upstream."""
    leaves = {name: case[name].clone().requires_grad_() for name in wanted}
    logp, entropy = ge.token_logprob(**{**case, **leaves, "impl": impl})
    if wanted:
        logp.backward(upstream(len(logp)).to(logp.dtype))
    return {"logp": logp.detach(), "entropy": entropy, **{n: x.grad for n, x in leaves.items()}}


def truth(case, wanted=()):
    def exact(x):
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return score({name: exact(x) for name, x in case.items()}, wanted, impl="torch")


def off(got, want):
    """The error as a share of what is wanted, by norm over the last dimension."""
    return ((got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)).max().item()


def largest(x):
    return x.double().abs().max().item()


def assert_close(got, want, dtype, slack=1.0):
    for name, x in want.items():
        if name in ("logp", "entropy"):
            atol = NATS[dtype] * slack
            torch.testing.assert_close(got[name].double(), x, rtol=0, atol=atol)
        else:
            assert got[name].dtype == (torch.float32 if name == "bias" else dtype)
            assert off(got[name].flatten(), x.flatten()) < SHARE[dtype] * slack, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", WIDTHS)
def test_every_path_at_every_width(isa, columns, dtype):
    case = make_head(9, columns, dtype)
    case["targets"][:3] = torch.tensor([0, columns - 1, columns // 2])
    found = {name: score(case, wanted) for name, wanted in PATHS.items()}
    for name, wanted in PATHS.items():
        assert_close(found[name], truth(case, wanted), dtype)
        # The ratio of a policy's log-prob to the same one scored before must be exactly 1.
        assert torch.equal(found[name]["logp"], found["scored"]["logp"])
        assert torch.equal(found[name]["entropy"], found["scored"]["entropy"])


def test_the_vocabulary_of_a_large_model():
    case = make_head(3, 151936, torch.bfloat16, std=4.0)
    case["targets"][0] = 151935
    for wanted in PATHS.values():
        assert_close(score(case, wanted), truth(case, wanted), torch.bfloat16, slack=2)


@pytest.mark.parametrize("std", [1.6, 4.0, 8.0])
def test_log_probs_of_bfloat16_heads_are_those_of_float32_logits(isa, std):
    case = make_head(64, 32003, torch.bfloat16, width=256, std=std)
    logits = torch.mm(case["hidden"], case["weight"].T).float()
    drawn = torch.multinomial(logits[::2].softmax(-1), 1, generator=torch.manual_seed(1))
    case["targets"][::2] = drawn.squeeze(1)  # half from the distribution, half from anywhere
    want = truth(case)["logp"]
    assert (score(case)["logp"] - want).abs().max() < 1e-3  # 5e-3 is what is asked for
    rounded = logits.log_softmax(-1).gather(1, case["targets"][:, None]).squeeze(1)
    assert (rounded - want).abs().max() > 1e-2


def head_with_p(p, dtype, std):
    """16 rows whose targets have the probability p: the hidden states lean to their weights."""
    case = make_head(16, 5000, dtype, width=128, std=std)
    at = case["targets"] = torch.arange(16) * 300
    hidden, weight = case["hidden"].double(), case["weight"].double()
    for _ in range(60):
        z = hidden.to(dtype).double() @ weight.T
        others = z.scatter(1, at[:, None], -INF).logsumexp(1)
        missing = others + math.log(p / (1 - p)) - z.gather(1, at[:, None]).squeeze(1)
        step = 0.7 * missing / weight[at].square().sum(1)
        hidden = hidden + step[:, None] * weight[at]
    return case | {"hidden": hidden.to(dtype)}


NEAR_ONE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}


# Beyond 0.998 most of the others are under the smallest float16.
@pytest.mark.parametrize(
    ("dtype", "p"), [*product(DTYPES[:2], [0.99, 0.999, 0.9999]), (torch.float16, 0.998)]
)
@pytest.mark.parametrize("std", [1.6, 4.0, 8.0])
def test_gradient_at_a_target_of_probability_almost_one(dtype, p, std):
    case = head_with_p(p, dtype, std)
    want = truth(case, ["hidden"])
    assert want["logp"].exp().sub(p).abs().max() < 0.05 * (1 - p)
    weight = case["weight"]
    for wanted in (["hidden"], ["hidden", "weight"]):
        assert off(score(case, wanted)["hidden"], want["hidden"]) < NEAR_ONE[dtype], wanted
    if dtype == torch.bfloat16:  # what it would be with p_y inside the product
        probability = torch.mm(case["hidden"], weight.T).float().softmax(-1).to(dtype)
        inside = weight[case["targets"]].float() - torch.mm(probability, weight).float()
        inside = inside * upstream(16)[:, None]
        assert off(inside, want["hidden"]) > 0.2


LENSES = {
    "temperature": {"temperature": torch.linspace(0.3, 7.0, 9)},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.125},
    "bias": {"bias": torch.linspace(-2, 3, 300)},
    "one for all": {"temperature": 0.6},
}
LENSES["all"] = {name: x for lens in list(LENSES.values())[:4] for name, x in lens.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", LENSES)
def test_what_lies_between_product_and_logits(isa, lens, dtype):
    case = make_head(9, 300, dtype, **LENSES[lens])
    for wanted in PATHS.values():
        assert_close(score(case, wanted), truth(case, wanted), dtype, slack=2)


@pytest.mark.parametrize("rows", [64, 10, 1])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("wanted", [ALL, ALL[1:], ALL[1:2], ALL[2:], ALL[::2]])
def test_only_what_is_asked_for_over_several_blocks_of_rows(monkeypatch, wanted, dtype, rows):
    case = make_head(70, 257, dtype, bias=torch.linspace(-2, 3, 257), tile_bytes=20_000)
    monkeypatch.setattr(tiled, "BACKWARD_ROWS", rows)
    assert_close(score(case, wanted), truth(case, wanted), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", PATHS.values())
def test_tiles_change_nothing_but_the_last_bit(wanted, dtype):
    whole = make_head(150, 1000, dtype)
    want = score(whole, wanted)
    row = 1000 * dtype.itemsize
    for tile_bytes in (1, 2 * row, 63 * row, 64 * row + 1, 100 * row, 150 * row):
        got = score(whole | {"tile_bytes": tile_bytes}, wanted)
        # The BLAS sums a product of one row in another order than one of many.
        torch.testing.assert_close(got["logp"], want["logp"], rtol=0, atol=NATS[dtype])
        for name in wanted:
            assert off(got[name].flatten(), want[name].double().flatten()) < SHARE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [-1000.0, 1000.0])
def test_all_logits_far_from_zero(isa, level, dtype):
    case = make_head(9, 300, dtype, bias=torch.linspace(-1, 1, 300))
    shifted = case | {"bias": case["bias"] + level}
    for wanted in PATHS.values():
        want = truth(case, wanted)  # an ulp at 1000 is 6e-5
        assert_close(score(shifted, wanted), want, dtype, slack=20)


@pytest.mark.parametrize("huge", [150.0, 3e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_huge_logit_takes_it_all(isa, dtype, huge):
    case = make_head(20, 300, dtype, bias=torch.zeros(300))
    case["targets"][:2] = 17
    case["bias"][17] = huge
    got, weight = score(case, ["hidden"]), case["weight"].float()
    torch.testing.assert_close(got["logp"].double(), truth(case)["logp"], rtol=1e-6, atol=1e-30)
    assert largest(got["hidden"][:2]) < 1e-30 and largest(got["entropy"]) < 1e-12
    slopes = (weight[case["targets"]] - weight[17]) * upstream(20)[:, None]
    assert off(got["hidden"][2:], slopes[2:].double()) < SHARE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_probability_zero(isa, dtype):
    case = make_head(9, 600, dtype, bias=torch.zeros(600))
    case["bias"][::2] = -INF
    case["bias"][:257] = -INF  # a block of nothing else
    case["targets"] = case["targets"] % 150 * 2 + 301
    case["targets"][3] = 4  # one of them is asked for
    got, want = score(case, ALL), truth(case, ALL)
    assert got["logp"][3] == want["logp"][3] == -INF
    assert_close(got, want, dtype)
    others = case["bias"] == -INF
    others[4] = False
    assert largest(got["weight"][others]) < 1e-30 and largest(got["bias"][others]) < 1e-30
    assert_close(score(case, ["hidden"]), truth(case, ["hidden"]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_stays_alone(dtype):
    case = make_head(5, 300, dtype)
    clean = score(case, ["hidden"])
    case["hidden"][2, 3] = math.nan
    got = score(case, ["hidden"])
    others = [0, 1, 3, 4]
    for name, x in got.items():
        assert x[2].isnan().all()
        assert torch.equal(x[others], clean[name][others])


def test_strided_inputs_and_int32_targets():
    case = make_head(12, 40, bias=torch.linspace(-1, 1, 40), temperature=torch.linspace(1, 2, 12))
    want = score(case, ALL)
    strided = {n: torch.stack([x, x + 1], -1)[..., 0] for n, x in case.items()}
    strided |= {name: case[name].T.contiguous().T for name in ("hidden", "weight")}
    strided["targets"] = strided["targets"].int()
    assert not any(x.is_contiguous() for name, x in strided.items() if name != "targets")
    got = score(strided, ALL)
    for name, x in want.items():
        assert torch.equal(got[name], x), name


@pytest.mark.parametrize("wanted", [(), ("hidden",), ALL])
def test_no_rows(wanted):
    got = score(make_head(0, 40, bias=torch.zeros(40)), wanted)
    assert got["logp"].shape == got["entropy"].shape == (0,)
    for name, shape in (("hidden", (0, 16)), ("weight", (40, 16)), ("bias", (40,))):
        assert name not in wanted or torch.equal(got[name], torch.zeros(shape))


def test_a_half_precision_gradient_of_the_weight_is_summed_in_float32(monkeypatch):
    # 64 blocks of 64 rows: summed in bfloat16, each would lose what is under 2^-8 of the sum.
    monkeypatch.setattr(tiled, "BACKWARD_ROWS", 64)
    case = make_head(4096, 50, torch.bfloat16)
    got, want = score(case, ["weight"])["weight"], truth(case, ["weight"])["weight"]
    assert off(got.flatten(), want.flatten()) < 2.5e-3  # one rounding to bfloat16 is 1.7e-3
