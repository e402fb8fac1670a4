"""Slow NumPy float64 versions of the formulas, written with loops and without looking at the library."""

import itertools
import json
import math
import pathlib

import numpy as np

GOLDEN = json.loads((pathlib.Path(__file__).parent / "data" / "worked_examples.json").read_text())


def golden(name):
    return np.asarray(GOLDEN[name], np.float64)


def ragged(seed, rows=5, width=7):
    """Random lengths and observation holes: logp, logp_old, logp_ref, adv per token, mask."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) < 0.6
    mask &= np.arange(width)[None] < rng.integers(0, width + 1, rows)[:, None]
    mask[0] = False
    mask[1, 0] = True
    logp, old, ref = (-rng.gamma(1.5, 0.7, (rows, width)) for _ in range(3))
    return logp, old, ref, rng.normal(size=(rows, width)), mask


def numeric_grad(f, x, step=1e-6):
    x = np.asarray(x, np.float64)
    grad = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        grad[index] = (f(up) - f(down)) / (2 * step)
    return grad


# masked


def aggregate(x, mask, mode, norm=None):
    rows = [[v for v, m in zip(r, k, strict=True) if m] for r, k in zip(x, mask, strict=True)]
    full = [r for r in rows if r]
    if not full:
        return 0.0
    tokens = [v for r in full for v in r]
    return {
        "token-mean": lambda: sum(tokens) / len(tokens),
        "token-sum": lambda: sum(tokens),
        "seq-mean-token-sum": lambda: sum(sum(r) for r in full) / len(full),
        "seq-mean-token-sum-norm": lambda: sum(sum(r) for r in full) / len(full) / norm,
        "seq-mean-token-mean": lambda: sum(sum(r) / len(r) for r in full) / len(full),
    }[mode]()


def whiten(x, mask, ddof=1, eps=1e-8):
    kept = np.asarray(x, np.float64)[mask]
    if kept.size == 0:
        return np.zeros_like(x)
    var = np.sum((kept - kept.mean()) ** 2) / max(kept.size - ddof, 1)
    return np.where(mask, (np.where(mask, x, 0) - kept.mean()) / math.sqrt(var + eps), 0.0)


# episodes


def place(reward, mask):
    out, written = np.zeros(len(reward)), [t for t, m in enumerate(mask) if m]
    for t, r in enumerate(reward):
        before = [w for w in written if w <= t]
        if before:
            out[before[-1]] += r
        elif written:
            out[written[0]] += r
    return out


def _compacted(fn, mask, arrays):
    keep = [t for t, m in enumerate(mask) if m]
    results = fn(*([a[t] for t in keep] for a in arrays))
    out = []
    for result in results:
        row = np.zeros(len(mask))
        row[keep] = result
        out.append(row)
    return out


def discounted_return(reward, mask, discount, bootstrap=0.0):
    def run(r):
        ret, g = [], bootstrap
        for x in reversed(r):
            g = x + discount * g
            ret.insert(0, g)
        return (ret,)

    return _compacted(run, mask, [place(reward, mask)])[0]


def gae(reward, value, mask, discount, lam, bootstrap=0.0):
    def run(r, v):
        adv, a, after = [], 0.0, bootstrap
        for x, here in zip(reversed(r), reversed(v), strict=True):
            a = x + discount * after - here + discount * lam * a
            after = here
            adv.insert(0, a)
        return adv, [a + b for a, b in zip(adv, v, strict=True)]

    return _compacted(run, mask, [place(reward, mask), value])


def turn_gae(
    reward, value, mask, turn, discount, lam, token_discount=1.0, token_lambda=None, bilevel=False, bootstrap=0.0
):
    def run(r, v, k):
        blocks = [list(b) for _, b in itertools.groupby(range(len(r)), key=lambda t: k[t])]
        total = [sum(r[t] for t in b) for b in blocks]
        ends = [v[b[-1]] for b in blocks]
        on = [True] * len(blocks)
        high, target = gae(total, ends, on, discount, lam, bootstrap)
        adv, targets = [], []
        for b, a, g, end in zip(blocks, high, target, ends, strict=True):
            if bilevel:
                inner = [0.0] * (len(b) - 1) + [a + end]
                x, y = gae(
                    inner,
                    [v[t] for t in b],
                    [True] * len(b),
                    token_discount,
                    lam if token_lambda is None else token_lambda,
                )
                adv += list(x)
                targets += list(y)
            else:
                adv += [a] * len(b)
                targets += [v[t] for t in b[:-1]] + [g]
        return adv, targets

    return _compacted(run, mask, [place(reward, mask), value, turn])


def vtrace(reward, value, logp, behaviour, mask, discount, lam=1.0, rho_clip=1.0, pg_clip=1.0, bootstrap=0.0):
    def run(r, v, p, b):
        rho = [math.exp(x - y) for x, y in zip(p, b, strict=True)]
        adv, target, e, after, q = [], [], 0.0, bootstrap, bootstrap
        for t in reversed(range(len(r))):
            adv.insert(0, min(pg_clip, rho[t]) * (r[t] + discount * q - v[t]))
            e = min(rho_clip, rho[t]) * (r[t] + discount * after - v[t]) + discount * lam * min(1, rho[t]) * e
            target.insert(0, v[t] + e)
            after, q = v[t], lam * target[0] + (1 - lam) * v[t]
        return adv, target

    return _compacted(run, mask, [place(reward, mask), value, logp, behaviour])


# groups


def per_group(fn, group, *arrays, where=None):
    where = np.ones(len(group), bool) if where is None else where
    out = np.zeros(len(group))
    for g in set(group):
        index = [i for i in range(len(group)) if group[i] == g and where[i] and g >= 0]
        if index:
            out[index] = fn(*(np.asarray(a, np.float64)[index] for a in arrays))
    return out


def group_relative(ret, group, scale="std", ddof=1, eps=1e-6, where=None):
    where = np.ones(len(group), bool) if where is None else where
    centred = per_group(lambda r: r - r.mean(), group, ret, where=where)

    def deviation(x):
        return math.sqrt(np.sum((x - x.mean()) ** 2) / max(len(x) - ddof, 1))

    if scale == "none":
        return centred
    if scale == "batch":
        return centred / (deviation(np.asarray(ret, np.float64)[where]) + eps)
    if scale == "batch-centred":
        return centred / (deviation(centred[where]) + eps)
    return per_group(
        lambda r: (r - r.mean()) / (deviation(r) + eps) if np.ptp(r) else np.zeros(len(r)), group, ret, where=where
    )


def leave_one_out(ret, group):
    return per_group(
        lambda r: np.array([x - (r.sum() - x) / (len(r) - 1) for x in r]) if len(r) > 1 else np.zeros(1), group, ret
    )


def length_weighted(ret, length, group):
    return per_group(lambda r, n: r - (r * n).sum() / n.sum(), group, ret, length)


def gpg(ret, group):
    useful = per_group(lambda r: np.full(len(r), float(np.ptp(r) > 0)), group, ret).sum()
    return group_relative(ret, group, "none") * (len(ret) / useful if useful else 0.0)


def pass_at_k_advantage(correct, group, k):
    def run(c):
        n, right = len(c), int(c.sum())
        wrong = n - right
        if n < k:
            return np.zeros(n)
        mean = 1 - math.comb(wrong, k) / math.comb(n, k)
        sigma = math.sqrt(mean * (1 - mean))
        if sigma == 0:
            return np.zeros(n)
        share = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
        return np.where(c > 0, (1 - mean) / sigma, (1 - mean - share) / sigma)

    return per_group(run, group, correct)


def max_at_k_advantage(ret, group, k, baseline=True):
    def run(r):
        n, out = len(r), np.zeros(len(r))
        if n < k:
            return out
        for subset in itertools.combinations(range(n), k):
            for i in subset:
                rest = [r[j] for j in subset if j != i]
                out[i] += max(r[j] for j in subset) - (max(rest) if rest and baseline else 0.0)
        out /= math.comb(n, k)
        return out if k > 1 or not baseline else (r - r.mean()) / (n - 1) if n > 1 else np.zeros(1)

    return per_group(run, group, ret)


def best_gap(ret, group, ddof=1, eps=1e-6):
    def run(r):
        out, order = np.zeros(len(r)), np.argsort(r)
        if len(r) > 1:
            sigma = math.sqrt(np.sum((r - r.mean()) ** 2) / max(len(r) - ddof, 1))
            out[order[-1]] = (r[order[-1]] - r[order[-2]]) / (sigma + eps)
        return out

    return per_group(run, group, ret)


def gdpo(rewards, weights, group, where, eps=1e-4):
    each = [group_relative(r, group, eps=eps, where=where) for r in np.transpose(rewards)]
    total = sum(w * x for w, x in zip(weights, each, strict=True))
    return group_relative(total, np.zeros(len(group), int), eps=eps, where=where)


def process_relative(reward, played, group, ddof=1, eps=1e-6):
    out = np.zeros(np.shape(reward))
    for g in set(group):
        steps = [(i, k) for i, k in zip(*np.nonzero(played), strict=True) if group[i] == g]
        paid = np.array([reward[step] for step in steps])
        scale = math.sqrt(np.sum((paid - paid.mean()) ** 2) / max(len(paid) - ddof, 1)) + eps if steps else 1.0
        for i, k in steps:
            out[i, k] = sum((reward[j, n] - paid.mean()) / scale for j, n in steps if j == i and n >= k)
    return out


def step_relative(value, anchor, played, group, scale="none", ddof=1, eps=1e-6):
    keys = [
        (group[i], anchor[i][k]) if played[i][k] else None for i in range(len(group)) for k in range(len(anchor[0]))
    ]
    names = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    ids = np.array([names[key] if key is not None else -1 for key in keys])
    flat = np.asarray(value, np.float64).ravel()
    return group_relative(flat, ids, scale, ddof, eps, where=ids >= 0).reshape(np.shape(value)) * played


def gigpo(reward, anchor, played, group, discount, omega, scale):
    n, width = np.shape(reward)
    ret = np.zeros((n, width))
    for i in range(n):
        g = 0.0
        for k in reversed(range(width)):
            if played[i][k]:
                g = reward[i][k] + discount * g
                ret[i, k] = g
    total = np.where(played, reward, 0).sum(1)
    episode = group_relative(total, group, scale, where=played.any(1))
    return (episode[:, None] + omega * step_relative(ret, anchor, played, group, scale)) * played


def tree_relative(ret, subgroup, size_weight=True):
    ret = np.asarray(ret, np.float64)
    out = np.zeros(len(ret))
    for i in range(len(ret)):
        top = bottom = 0.0
        for depth in range(subgroup.shape[1]):
            if subgroup[i, depth] < 0:
                continue
            mates = [j for j in range(len(ret)) if subgroup[j, depth] == subgroup[i, depth]]
            if depth and len(mates) < 2:
                continue
            w = len(mates) if size_weight else 1.0
            top += w * (ret[i] - ret[mates].mean())
            bottom += w
        out[i] = top / max(bottom, 1)
    return out


def ktae_key(a, b, c, d):
    rows, cols, n = a + b, a + c, a + b + c + d

    def prob(x):
        return math.comb(cols, x) * math.comb(n - cols, rows - x) / math.comb(n, rows)

    if a + c == 0 or b + d == 0:
        return 0.0
    support = range(max(0, rows + cols - n), min(rows, cols) + 1)
    p = min(1.0, sum(prob(x) for x in support if prob(x) <= prob(a) * (1 + 1e-7)))

    def bits(x, y):
        return -sum(z / (x + y) * math.log2(z / (x + y)) for z in (x, y) if z) if x + y else 0.0

    gain = bits(a + c, b + d) - ((a + b) * bits(a, b) + (c + d) * bits(c, d)) / n
    strength = 0.0 if p > 1 - 1e-9 else math.exp(-2 * p)
    effect = math.asin(math.sqrt(a / (a + c))) - math.asin(math.sqrt(b / (b + d)))
    s = (strength + gain) * effect / 2
    return 2 * (1 / (1 + math.exp(-s)) - 0.5)


# losses, one token at a time


def ppo(logp, old, adv, low=0.2, high=0.2, dual=None, ratio_max=None):
    ratio = math.exp(logp - old)
    free = ratio if ratio_max is None else min(ratio, ratio_max)
    loss = max(-adv * free, -adv * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -adv * dual) if dual is not None and adv < 0 else loss


def sapo(logp, old, adv, tau_pos=1.0, tau_neg=1.05):
    tau = tau_pos if adv > 0 else tau_neg
    return -adv * 4 / tau / (1 + math.exp(-tau * (math.exp(logp - old) - 1)))


def cispo(logp, old, adv, low, high):
    return -min(max(math.exp(logp - old), 1 - low), 1 + high) * adv * logp


def kl(logp, ref, estimator):
    d = logp - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def value_clip(value, old, target, eps):
    clipped = old + min(max(value - old, -eps), eps)
    return max((value - target) ** 2, (clipped - target) ** 2) / 2


def per_token(fn, mask, *arrays):
    out = np.zeros(np.shape(mask))
    for index in zip(*np.nonzero(mask), strict=True):
        out[index] = fn(*(float(a[index]) for a in arrays))
    return out


def gspo(logp, old, adv, mask, low, high):
    out = np.zeros(len(mask))
    for i, m in enumerate(mask):
        if m.any():
            s = math.exp(np.mean((logp[i] - old[i])[m]))
            out[i] = max(-adv[i] * s, -adv[i] * min(max(s, 1 - low), 1 + high))
    return out


def gmpo(logp, old, adv, mask, low, high):
    out = np.zeros(len(mask))
    for i, m in enumerate(mask):
        if m.any():
            sign = np.sign(adv[i])
            held = [sign * min(sign * d, sign * min(max(d, -low), high)) for d in (logp[i] - old[i])[m]]
            out[i] = -adv[i] * math.exp(np.mean(held))
    return out


# Losses with a stop-gradient take the log-probability twice: ``held`` is what no gradient flows through.


def asymmetric_is(logp, held, old, adv, low, high, cap):
    ratio = math.exp(held - old)
    if adv > 0:
        weight = 0.0 if ratio > 1 + high else min(1 / ratio, cap)
    else:
        weight = 0.0 if ratio < 1 - low else min(ratio, cap)
    return -adv * weight * math.exp(logp - held)


def decoupled_ppo(logp, old, behaviour, adv, low, high, cap):
    return min(math.exp(old - behaviour), cap) * ppo(logp, old, adv, low, high)


def rl_plus(logp, held, old, adv, power):
    p, p_old = math.exp(logp), math.exp(old)
    omega = (1 + p_old) / 2
    return -adv * (1 - math.exp(held)) ** power * 2 * p / (p_old + omega)


def luffy(logp, adv, gamma):
    p = math.exp(logp)
    return -adv * p / (p + gamma)


def chord_phi(logp, held):
    p = math.exp(held)
    return -p * (1 - p) * logp


def dft(logp, held):
    return -math.exp(held) * logp


def awr(logp, adv, beta, weight_max):
    return -min(math.exp(adv / beta), weight_max) * logp


def gspo_token(logp, held, old, adv, mask, low, high):
    out = np.zeros(np.shape(mask))
    for i, m in enumerate(mask):
        for t in np.flatnonzero(m):
            s = math.exp(np.mean((held[i] - old[i])[m])) * math.exp(logp[i, t] - held[i, t])
            out[i, t] = max(-adv[i, t] * s, -adv[i, t] * min(max(s, 1 - low), 1 + high))
    return out


# preferences, one pair at a time


def log_sigmoid(z):
    return -math.log1p(math.exp(-z)) if z > 0 else z - math.log1p(math.exp(z))


def dpo(w, l, ref_w, ref_l, beta, smoothing=0.0):  # noqa: E741
    z = beta * ((w - ref_w) - (l - ref_l))
    return -(1 - smoothing) * log_sigmoid(z) - smoothing * log_sigmoid(-z)


def robust_dpo(w, l, ref_w, ref_l, beta, label_noise):  # noqa: E741
    right, flipped = dpo(w, l, ref_w, ref_l, beta), dpo(l, w, ref_l, ref_w, beta)
    return ((1 - label_noise) * right - label_noise * flipped) / (1 - 2 * label_noise)


def hinge(w, l, ref_w, ref_l, beta):  # noqa: E741
    return max(0.0, 1 - beta * ((w - ref_w) - (l - ref_l)))


def ipo(w, l, ref_w, ref_l, beta):  # noqa: E741
    return ((w - ref_w) - (l - ref_l) - 1 / (2 * beta)) ** 2


def kto(logp, ref, desirable, reference, beta, weight_desirable, weight_undesirable):
    gap = (logp - ref) - reference
    if desirable:
        return weight_desirable * (1 - 1 / (1 + math.exp(-beta * gap)))
    return weight_undesirable * (1 - 1 / (1 + math.exp(beta * gap)))


def lcpo(mean_w, mean_l):
    return -log_sigmoid(log_odds(mean_w) - log_odds(mean_l))


def orpo(mean_w, mean_l, coef):
    return -mean_w + coef * lcpo(mean_w, mean_l)


def simpo(mean_w, mean_l, beta, gamma):
    return -log_sigmoid(beta * (mean_w - mean_l) - gamma)


def cpo(w, l, nll, beta, coef):  # noqa: E741
    return -log_sigmoid(beta * (w - l)) + coef * nll


def bradley_terry(reward_w, reward_l, label_margin, centre_coef):
    return -log_sigmoid(reward_w - reward_l - label_margin) + centre_coef * (reward_w + reward_l) ** 2


def log_odds(mean):
    return mean - math.log(1 - math.exp(mean))


def dmpo(ratio_w, ratio_l, beta, discount):
    def total(ratio):
        n = len(ratio)
        if discount == 1:
            return sum((n - t) / n * r for t, r in enumerate(ratio))
        return sum(discount**t * (1 - discount ** (n - t)) / (1 - discount**n) * r for t, r in enumerate(ratio))

    return -log_sigmoid(beta * (total(ratio_w) - total(ratio_l)))
