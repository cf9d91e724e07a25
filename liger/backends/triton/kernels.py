"""Device code of the row kernels. The equations are in `liger.spec`; the names of its coefficients a, b, d are used here.

One program owns one row. Statistics are kept per lane group (WIDTH neighbouring logits, what one 16-byte load brings) as a
vector of running (maximum, sum) pairs and reduced once at the end of the row: no barrier inside the loop, and one rescaling
exponential per group instead of one per logit. The first HELD logits of a row stay in registers between the pass that
computes statistics and the pass that writes the gradient, so only the others are read a second time.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

LOG2_E = tl.constexpr(1.4426950408889634)
# What a program reads or writes one element of gains nothing by a known alignment, and chunks begin anywhere: without this
# Triton would compile a kernel for each combination of aligned and other addresses.
ONE_ELEMENT = [
    *("target_ptr", "target_weight_ptr", "class_weight_sum_ptr", "core_divisor_ptr", "z_divisor_ptr"),
    *("loss_ptr", "z_loss_ptr", "predicted_ptr", "lse_ptr", "grad_loss_ptr", "factor_ptr"),
]
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: a group with nothing in it yields exp(-inf - LOWEST) = 0


@triton.jit
def _load(row_ptr, offsets, stride, vocab, MASKED: tl.constexpr, STRIDED: tl.constexpr, EVICT: tl.constexpr):
    if STRIDED:  # a column of a transposed matrix may lie past 2^31 elements
        pointers = row_ptr + offsets.to(tl.int64) * stride
    else:
        pointers = row_ptr + offsets
    if MASKED:
        return tl.load(pointers, mask=offsets < vocab, other=0.0, eviction_policy=EVICT)
    return tl.load(pointers, eviction_policy=EVICT)


@triton.jit
def _store(row_ptr, offsets, stride, vocab, values, MASKED: tl.constexpr, STRIDED: tl.constexpr):
    if STRIDED:
        pointers = row_ptr + offsets.to(tl.int64) * stride
    else:
        pointers = row_ptr + offsets
    values = values.to(row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(pointers, values, mask=offsets < vocab, cache_modifier=".cs")
    else:
        tl.store(pointers, values, cache_modifier=".cs")


@triton.jit
def _tanh(x):
    # (1 - e) / (1 + e) cancels near 0; there five terms of the series are exact to fp32.
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _capped(x, logit_scale, softcap):
    x = x.to(tl.float32)
    if logit_scale is not None:
        x *= logit_scale
    if softcap is not None:
        x = softcap * _tanh(x / softcap)
    return x


@triton.jit
def _capped_block(x, offsets, vocab, logit_scale, softcap, MASKED: tl.constexpr):
    """Logits after the soft cap; padding lanes are -inf so that they carry no mass."""
    s = _capped(x, logit_scale, softcap)
    if MASKED:
        s = tl.where(offsets < vocab, s, -float("inf"))
    return s


@triton.jit
def _moved(weighted, weights, shift):
    """sum w (s - m) after m has changed by -`shift`; where nothing has been added yet `shift` may be anything."""
    return weighted + tl.where(weights == 0.0, 0.0, weights * shift)


@triton.jit
def _add_block(
    s, offsets, vocab, maxima, sums, weighted, weights, class_weight_ptr,
    SMOOTHING: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Fold a block into the running statistics of its lane groups."""
    BLOCK: tl.constexpr = s.shape[0]
    groups = tl.reshape(s, (BLOCK // WIDTH, WIDTH))
    larger = tl.maximum(maxima, tl.max(groups, 1))
    exps = tl.exp2((groups - larger[:, None]) * LOG2_E)
    sums = sums * tl.exp2((maxima - larger) * LOG2_E) + tl.sum(exps, 1)
    if SMOOTHING:
        there = offsets < vocab
        if class_weight_ptr is not None:
            w = tl.load(class_weight_ptr + offsets, mask=there, other=0.0)
        else:
            w = tl.where(there, 1.0, 0.0)
        w = tl.reshape(w, (BLOCK // WIDTH, WIDTH))
        terms = w * (groups - larger[:, None])
        if MASKED:
            terms = tl.where(tl.reshape(there, (BLOCK // WIDTH, WIDTH)), terms, 0.0)
        weighted = _moved(weighted, weights, maxima - larger) + tl.sum(terms, 1)
        weights += tl.sum(w, 1)
    return larger, sums, weighted, weights


@triton.jit
def _statistics(
    row_ptr, stride, vocab, logit_scale, softcap, class_weight_ptr, start, maxima, sums, weighted, weights,
    SMOOTHING: tl.constexpr, STRIDED: tl.constexpr, EVICT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Statistics of a row from `start` on, added to those given: m, sum exp(s - m), sum w (s - m), sum w of lane groups."""
    lanes = tl.arange(0, BLOCK)
    full = vocab // BLOCK * BLOCK
    for begin in range(start, full, BLOCK):
        offsets = begin + lanes
        s = _capped(_load(row_ptr, offsets, stride, vocab, False, STRIDED, EVICT), logit_scale, softcap)
        maxima, sums, weighted, weights = _add_block(
            s, offsets, vocab, maxima, sums, weighted, weights, class_weight_ptr, SMOOTHING, False, WIDTH
        )
    if tl.maximum(full, start) < vocab:
        offsets = full + lanes
        x = _load(row_ptr, offsets, stride, vocab, True, STRIDED, EVICT)
        s = _capped_block(x, offsets, vocab, logit_scale, softcap, True)
        maxima, sums, weighted, weights = _add_block(
            s, offsets, vocab, maxima, sums, weighted, weights, class_weight_ptr, SMOOTHING, True, WIDTH
        )
    return maxima, sums, weighted, weights


@triton.jit
def _reduced(maxima, sums, weighted, weights):
    maximum = tl.max(maxima, 0)
    sum_exp = tl.sum(sums * tl.exp2((maxima - maximum) * LOG2_E), 0)
    return maximum, sum_exp, tl.sum(_moved(weighted, weights, maxima - maximum), 0)


@triton.jit
def _nothing(BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Running statistics of lane groups before the first block."""
    zeros = tl.zeros((BLOCK // WIDTH,), tl.float32)
    return tl.full((BLOCK // WIDTH,), LOWEST, tl.float32), zeros, zeros, zeros


@triton.jit
def _row_stats(
    row_ptr, stride, vocab, y, logit_scale, softcap, class_weight_ptr,
    SMOOTHING: tl.constexpr, STRIDED: tl.constexpr, EVICT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """m, sum exp(s - m), sum w (s - m) and s_y of a row; s_y is NaN where the target is no column of it."""
    here = (y >= 0) & (y < vocab)
    target_logit = _capped(tl.load(row_ptr + tl.where(here, y, 0) * stride), logit_scale, softcap)
    maxima, sums, weighted, weights = _nothing(BLOCK, WIDTH)
    maxima, sums, weighted, weights = _statistics(
        row_ptr, stride, vocab, logit_scale, softcap, class_weight_ptr, 0, maxima, sums, weighted, weights,
        SMOOTHING, STRIDED, EVICT, BLOCK, WIDTH,
    )  # fmt: skip
    maximum, sum_exp, weighted_sum = _reduced(maxima, sums, weighted, weights)
    return maximum, sum_exp, weighted_sum, tl.where(here, target_logit, float("nan"))


@triton.jit
def _argmax(row_ptr, stride, vocab, logit_scale, softcap, maximum, STRIDED: tl.constexpr, BLOCK: tl.constexpr):
    """Lowest index whose capped logit is the maximum; 0 for a row that has none (all NaN or all -inf)."""
    best = tl.full((BLOCK,), vocab, tl.int32)
    for begin in range(0, vocab, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        x = _load(row_ptr, offsets, stride, vocab, True, STRIDED, "")
        s = _capped_block(x, offsets, vocab, logit_scale, softcap, True)
        best = tl.minimum(best, tl.where(s == maximum, offsets, vocab))
    found = tl.min(best, 0)
    return tl.where(found < vocab, found, 0)


@triton.jit
def _inverse(divisor_ptr):
    if divisor_ptr is None:
        inverse = 1.0
    else:
        divisor = tl.load(divisor_ptr).to(tl.float32)
        inverse = tl.where(divisor != 0.0, 1.0 / divisor, 0.0)
    return inverse


@triton.jit
def _coefficients(
    row, vocab, maximum, log_sum, t, target_weight_ptr, class_weight_sum_ptr, core_divisor_ptr, z_divisor_ptr,
    label_smoothing, lse_square_scale,
):  # fmt: skip
    """a, b and d of the row's gradient; `t` scales the row and is NaN if its target is out of range."""
    core = t * _inverse(core_divisor_ptr)
    b = core * (1.0 - label_smoothing)
    if target_weight_ptr is not None:
        b *= tl.load(target_weight_ptr + row)
    d = core * label_smoothing / vocab
    if class_weight_sum_ptr is not None:
        weight_sum = tl.load(class_weight_sum_ptr)
    else:
        weight_sum = vocab * 1.0
    a = b + d * weight_sum + t * _inverse(z_divisor_ptr) * 2.0 * lse_square_scale * (maximum + log_sum)
    return a, b, d


@triton.jit
def _gradient_block(
    s, offsets, vocab, y, maximum, log_sum, a, b, d, softcap, class_weight_ptr, SMOOTHING: tl.constexpr
):  # fmt: skip
    p = tl.exp2((s - maximum) * LOG2_E - log_sum * LOG2_E)
    g = a * p
    if SMOOTHING:
        if class_weight_ptr is not None:
            g -= d * tl.load(class_weight_ptr + offsets, mask=offsets < vocab, other=0.0)
        else:
            g -= d
    g = tl.where(offsets == y, g - b, g)
    if softcap is not None:
        ratio = s / softcap
        g *= 1.0 - ratio * ratio
    return g


@triton.jit
def _write_gradient(
    row_ptr, stride, grad_ptr, grad_stride, vocab, y, maximum, log_sum, a, b, d, logit_scale, softcap, class_weight_ptr, start,
    SMOOTHING: tl.constexpr, STRIDED: tl.constexpr, GRAD_STRIDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of a row from `start` on, reading the logits (again)."""
    lanes = tl.arange(0, BLOCK)
    full = vocab // BLOCK * BLOCK
    for begin in range(start, full, BLOCK):
        offsets = begin + lanes
        s = _capped(_load(row_ptr, offsets, stride, vocab, False, STRIDED, "evict_first"), logit_scale, softcap)
        g = _gradient_block(s, offsets, vocab, y, maximum, log_sum, a, b, d, softcap, class_weight_ptr, SMOOTHING)
        _store(grad_ptr, offsets, grad_stride, vocab, g, False, GRAD_STRIDED)
    if tl.maximum(full, start) < vocab:
        offsets = full + lanes
        s = _capped(_load(row_ptr, offsets, stride, vocab, True, STRIDED, "evict_first"), logit_scale, softcap)
        g = _gradient_block(s, offsets, vocab, y, maximum, log_sum, a, b, d, softcap, class_weight_ptr, SMOOTHING)
        _store(grad_ptr, offsets, grad_stride, vocab, g, True, GRAD_STRIDED)


@triton.jit
def _write_zeros(grad_ptr, grad_stride, vocab, GRAD_STRIDED: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(0, vocab, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        _store(grad_ptr, offsets, grad_stride, vocab, tl.zeros((BLOCK,), tl.float32), True, GRAD_STRIDED)


@triton.jit
def _write_ignored(
    row, vocab, loss_ptr, z_loss_ptr, predicted_ptr, lse_ptr, lse_stride, grad_row_ptr, grad_stride,
    GRAD_STRIDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Everything of an ignored row, which nobody needs to have read."""
    tl.store(loss_ptr + row, 0.0)
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr + row, 0.0)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, -1)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, 0.0)
        tl.store(lse_ptr + lse_stride + row, 0.0)
    if grad_row_ptr is not None:
        _write_zeros(grad_row_ptr, grad_stride, vocab, GRAD_STRIDED, BLOCK)


@triton.jit
def _write_loss(
    row, vocab, in_range, maximum, log_sum, weighted_sum, target_logit, target_weight_ptr, class_weight_sum_ptr,
    core_divisor_ptr, z_divisor_ptr, loss_ptr, z_loss_ptr, lse_ptr, lse_stride, label_smoothing, lse_square_scale, logit_scale,
    SMOOTHING: tl.constexpr, TOKEN_SCALING: tl.constexpr,
):  # fmt: skip
    """Loss, z-loss and (m, log sum) of a row from its statistics over `vocab` classes; returns a, b and d of its gradient."""
    nll = log_sum - (target_logit - maximum)
    t = tl.where(in_range, 1.0, float("nan"))
    if TOKEN_SCALING:
        t *= tl.exp2(-nll * LOG2_E)
    a, b, d = _coefficients(
        row, vocab, maximum, log_sum, t, target_weight_ptr, class_weight_sum_ptr, core_divisor_ptr, z_divisor_ptr,
        label_smoothing, lse_square_scale,
    )  # fmt: skip
    loss = b * nll  # b = t (1 - e) w_y / D, so this is the core term without smoothing
    if SMOOTHING:
        if class_weight_sum_ptr is not None:
            weight_sum = tl.load(class_weight_sum_ptr)
        else:
            weight_sum = vocab * 1.0
        loss += d * (weight_sum * log_sum - weighted_sum)
    lse = maximum + log_sum
    z = t * _inverse(z_divisor_ptr) * (lse_square_scale * lse) * lse  # in this order 0 times a huge lse stays 0
    tl.store(loss_ptr + row, loss + z)
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr + row, z)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, maximum)
        tl.store(lse_ptr + lse_stride + row, log_sum)
    if logit_scale is not None:
        a, b, d = a * logit_scale, b * logit_scale, d * logit_scale
    return a, b, d


@triton.jit(
    do_not_specialize=["ignore_index", "target_stride", "lse_stride", "grad_loss_stride"],
    do_not_specialize_on_alignment=ONE_ELEMENT,
)
def rows_kernel(
    logits_ptr, logits_row_stride, logits_stride, grad_ptr, grad_row_stride, grad_stride, target_ptr, target_stride,
    class_weight_ptr, target_weight_ptr, class_weight_sum_ptr, core_divisor_ptr, z_divisor_ptr,
    loss_ptr, z_loss_ptr, predicted_ptr, lse_ptr, lse_stride,
    vocab, ignore_index, label_smoothing, lse_square_scale, logit_scale, softcap,
    SMOOTHING: tl.constexpr, TOKEN_SCALING: tl.constexpr, STRIDED: tl.constexpr, GRAD_STRIDED: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Statistics, loss and, with `grad_ptr`, gradient of one row in one launch.

    Reads the row once, and all but its first HELD logits a second time (mostly from L2) for the gradient, which is
    written once; a prediction reads it once more. Pointers that are None leave their part out.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    y = tl.load(target_ptr + row * target_stride).to(tl.int64)
    grad_row_ptr = None if grad_ptr is None else grad_ptr + row * grad_row_stride

    if y == ignore_index:
        _write_ignored(
            row, vocab, loss_ptr, z_loss_ptr, predicted_ptr, lse_ptr, lse_stride, grad_row_ptr, grad_stride, GRAD_STRIDED, BLOCK
        )
        return

    in_range = (y >= 0) & (y < vocab)
    y = tl.where(in_range, y, 0)
    target_logit = _capped(tl.load(row_ptr + y * logits_stride), logit_scale, softcap)

    lanes = tl.arange(0, BLOCK)
    maxima, sums, weighted, weights = _nothing(BLOCK, WIDTH)
    held = ()
    for i in tl.static_range(HELD // BLOCK):
        offsets = i * BLOCK + lanes
        x = _load(row_ptr, offsets, logits_stride, vocab, False, STRIDED, "evict_first")
        held = held + (x,)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no starred expression)
    for i in tl.static_range(HELD // BLOCK):
        offsets = i * BLOCK + lanes
        s = _capped(held[i], logit_scale, softcap)
        maxima, sums, weighted, weights = _add_block(
            s, offsets, vocab, maxima, sums, weighted, weights, class_weight_ptr, SMOOTHING, False, WIDTH
        )
    maxima, sums, weighted, weights = _statistics(
        row_ptr, logits_stride, vocab, logit_scale, softcap, class_weight_ptr, HELD, maxima, sums, weighted, weights,
        SMOOTHING, STRIDED, "evict_last" if grad_ptr is not None else "evict_first", BLOCK, WIDTH,
    )  # fmt: skip
    maximum, sum_exp, weighted_sum = _reduced(maxima, sums, weighted, weights)
    log_sum = tl.log(sum_exp)
    a, b, d = _write_loss(
        row, vocab, in_range, maximum, log_sum, weighted_sum, target_logit, target_weight_ptr, class_weight_sum_ptr,
        core_divisor_ptr, z_divisor_ptr, loss_ptr, z_loss_ptr, lse_ptr, lse_stride, label_smoothing, lse_square_scale,
        logit_scale, SMOOTHING, TOKEN_SCALING,
    )  # fmt: skip
    if predicted_ptr is not None:
        best = _argmax(row_ptr, logits_stride, vocab, logit_scale, softcap, maximum, STRIDED, BLOCK)
        tl.store(predicted_ptr + row, best.to(tl.int64))

    if grad_ptr is not None:
        for i in tl.static_range(HELD // BLOCK):
            offsets = i * BLOCK + lanes
            s = _capped(held[i], logit_scale, softcap)
            g = _gradient_block(s, offsets, vocab, y, maximum, log_sum, a, b, d, softcap, class_weight_ptr, SMOOTHING)
            _store(grad_row_ptr, offsets, grad_stride, vocab, g, False, GRAD_STRIDED)
        _write_gradient(
            row_ptr, logits_stride, grad_row_ptr, grad_stride, vocab, y, maximum, log_sum, a, b, d, logit_scale, softcap,
            class_weight_ptr, HELD, SMOOTHING, STRIDED, GRAD_STRIDED, BLOCK,
        )  # fmt: skip


@triton.jit
def _slot(sender, row, tag, capacity, RANKS: tl.constexpr, WORDS: tl.constexpr):
    """Where in a rank's buffer the first word of what `sender` says of a row is."""
    return (((tag & 1) * RANKS + sender).to(tl.int64) * capacity + row) * WORDS


@triton.jit
def _send(
    addresses_ptr, rank, capacity, tag, row, maximum, sum_exp, target_logit,
    RANKS: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Tell every rank, this one too, a row's statistics over this rank's classes: see `liger.exchange`.

    A number travels with the tag of its call in one 64-bit store, so that whoever sees the tag has the number, and no order
    of two stores matters (as in NCCL's protocol for small messages).
    """
    lanes = tl.arange(0, LANES)
    peer, place = lanes // WORDS, lanes % WORDS
    sends = (peer < RANKS) & (place < 3)
    values = tl.where(place == 0, maximum, tl.where(place == 1, sum_exp, target_logit))
    words = (tag.to(tl.int64) << 32) | (values.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    buffers = tl.load(addresses_ptr + peer, mask=sends, other=0).to(tl.pointer_type(tl.int64))
    to_peers = buffers + _slot(rank, row, tag, capacity, RANKS, WORDS) + place
    tl.atomic_xchg(to_peers, words, mask=sends, sem="relaxed", scope="sys")


@triton.jit
def _number(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _combined(buffer, capacity, tag, row, RANKS: tl.constexpr, WORDS: tl.constexpr):
    """(m, sum exp(s - m), s_y) of a row over the classes of all ranks, and whether all of them have come."""
    maximum = tl.full((), LOWEST, tl.float32)
    sum_exp = tl.full((), 0.0, tl.float32)
    target_logit = tl.full((), float("nan"), tl.float32)
    complete = tag > 0
    for sender in tl.static_range(RANKS):  # in one order, so that all ranks have the same bits
        words = buffer + _slot(tl.full((), sender, tl.int32), row, tag, capacity, RANKS, WORDS)
        first = tl.load(words, volatile=True)
        second = tl.load(words + 1, volatile=True)
        third = tl.load(words + 2, volatile=True)
        complete = complete & ((first >> 32) == tag) & ((second >> 32) == tag) & ((third >> 32) == tag)
        m = _number(first)
        larger = tl.maximum(maximum, m)
        # Left to itself the compiler would fuse one product here where words are awaited and the other where they are not.
        scaled = sum_exp * tl.exp2((maximum - larger) * LOG2_E)
        sum_exp = tl.fma(_number(second), tl.exp2((m - larger) * LOG2_E), scaled)
        maximum = larger
        target_logit = tl.where(target_logit == target_logit, target_logit, _number(third))  # the one that is not NaN
    return maximum, sum_exp, target_logit, complete


@triton.jit
def _receive(
    addresses_ptr, rank, capacity, tag, patience, row, RANKS: tl.constexpr, WORDS: tl.constexpr, CLOCK: tl.constexpr
):  # fmt: skip
    """A row's statistics over the classes of all ranks, which have `patience`: ns, or attempts where there is no clock.

    Every thread reads the words itself and goes on when it has them: no barrier may be in here.
    """
    buffer = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64))
    maximum, sum_exp, target_logit, complete = _combined(buffer, capacity, tag, row, RANKS, WORDS)
    began = tl.full((), 0, tl.int64)
    waited = tl.full((), 0, tl.int64)
    while (complete == 0) & (waited < patience):
        maximum, sum_exp, target_logit, complete = _combined(buffer, capacity, tag, row, RANKS, WORDS)
        if CLOCK:
            now = globaltimer()
            began = tl.where(began == 0, now, began)
            waited = now - began
        else:
            waited += 1
    assert complete, "the statistics of another rank did not come within the timeout of the process group"  # noqa: S101
    return maximum, sum_exp, target_logit


@triton.jit(
    do_not_specialize=[
        *("ignore_index", "target_stride", "lse_stride", "start", "total"),
        *("rows", "lag", "rank", "capacity", "tag", "patience"),
    ],
    do_not_specialize_on_alignment=ONE_ELEMENT,
)
def exchanged_rows_kernel(
    logits_ptr, logits_row_stride, logits_stride, grad_ptr, grad_row_stride, grad_stride, target_ptr, target_stride,
    target_weight_ptr, core_divisor_ptr, z_divisor_ptr, loss_ptr, z_loss_ptr, lse_ptr, lse_stride,
    vocab, start, total, ignore_index, lse_square_scale, logit_scale, softcap,
    rows, lag, addresses_ptr, rank, capacity, tag, patience,
    STRIDED: tl.constexpr, GRAD_STRIDED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    RANKS: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Loss and, with `grad_ptr`, gradient over `total` classes, of which this rank has `vocab` from `start` on.

    Program r sends the statistics of row r and finishes row r - `lag`: the longer the lag, the surer others have sent theirs
    by then; the shorter, the surer the row is still in L2 for its second read. GPUs start programs in the order of their
    ids, and no program waits for what one with a larger id sends: of those that have not ended on some GPU, the lowest has
    all it needs or will get it from one that runs. An ignored row is not read, but sent like every other, so that no kernel
    ends before its peers' have come as far.

    With the gradient in the logits' own memory, a row is overwritten only after its words, the rank's own too, have come.
    """
    sent = tl.program_id(0).to(tl.int64)
    if sent < rows:
        y = tl.load(target_ptr + sent * target_stride).to(tl.int64)
        maximum = tl.full((), LOWEST, tl.float32)
        sum_exp = tl.full((), 0.0, tl.float32)
        target_logit = tl.full((), float("nan"), tl.float32)
        if y != ignore_index:
            maximum, sum_exp, _, target_logit = _row_stats(
                logits_ptr + sent * logits_row_stride, logits_stride, vocab, y - start, logit_scale, softcap, None,
                False, STRIDED, "evict_last" if grad_ptr is not None else "evict_first", BLOCK, WIDTH,
            )  # fmt: skip
        _send(addresses_ptr, rank, capacity, tag, sent, maximum, sum_exp, target_logit, RANKS, WORDS, LANES)

    row = sent - lag
    if row >= 0:
        maximum, sum_exp, target_logit = _receive(addresses_ptr, rank, capacity, tag, patience, row, RANKS, WORDS, CLOCK)
        y = tl.load(target_ptr + row * target_stride).to(tl.int64)
        grad_row_ptr = None if grad_ptr is None else grad_ptr + row * grad_row_stride
        if y == ignore_index:
            _write_ignored(
                row, vocab, loss_ptr, z_loss_ptr, None, lse_ptr, lse_stride, grad_row_ptr, grad_stride, GRAD_STRIDED, BLOCK
            )
        else:
            log_sum = tl.log(sum_exp)
            a, b, d = _write_loss(
                row, total, (y >= 0) & (y < total), maximum, log_sum, 0.0, target_logit, target_weight_ptr, None,
                core_divisor_ptr, z_divisor_ptr, loss_ptr, z_loss_ptr, lse_ptr, lse_stride, 0.0, lse_square_scale, logit_scale,
                False, False,
            )  # fmt: skip
            if grad_ptr is not None:
                _write_gradient(
                    logits_ptr + row * logits_row_stride, logits_stride, grad_row_ptr, grad_stride, vocab, y - start,
                    maximum, log_sum, a, b, d, logit_scale, softcap, None, 0, False, STRIDED, GRAD_STRIDED, BLOCK,
                )  # fmt: skip


@triton.jit(do_not_specialize=["start"], do_not_specialize_on_alignment=ONE_ELEMENT)
def row_stats_kernel(
    logits_ptr, logits_row_stride, logits_stride, target_ptr, target_stride, class_weight_ptr,
    maximum_ptr, sum_exp_ptr, target_logit_ptr, weighted_sum_ptr, argmax_ptr, vocab, start, logit_scale, softcap,
    SMOOTHING: tl.constexpr, STRIDED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Statistics of one row over `vocab` classes from `start` on. Reads it once."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    y = tl.load(target_ptr + row * target_stride).to(tl.int64) - start
    maximum, sum_exp, weighted_sum, target_logit = _row_stats(
        row_ptr, logits_stride, vocab, y, logit_scale, softcap, class_weight_ptr,
        SMOOTHING, STRIDED, "evict_first", BLOCK, WIDTH,
    )  # fmt: skip
    tl.store(maximum_ptr + row, maximum)
    tl.store(sum_exp_ptr + row, sum_exp)
    tl.store(target_logit_ptr + row, target_logit - maximum)
    if weighted_sum_ptr is not None:
        tl.store(weighted_sum_ptr + row, weighted_sum)
    if argmax_ptr is not None:
        best = _argmax(row_ptr, logits_stride, vocab, logit_scale, softcap, maximum, STRIDED, BLOCK)
        tl.store(argmax_ptr + row, best.to(tl.int64))


@triton.jit(
    do_not_specialize=["ignore_index", "target_stride", "lse_stride", "grad_loss_stride", "start", "total"],
    do_not_specialize_on_alignment=ONE_ELEMENT,
)
def row_grad_kernel(
    logits_ptr, logits_row_stride, logits_stride, grad_ptr, grad_row_stride, grad_stride, target_ptr, target_stride,
    class_weight_ptr, target_weight_ptr, class_weight_sum_ptr, core_divisor_ptr, z_divisor_ptr, lse_ptr, lse_stride,
    grad_loss_ptr, grad_loss_stride, vocab, start, total,
    ignore_index, label_smoothing, lse_square_scale, logit_scale, softcap,
    SMOOTHING: tl.constexpr, TOKEN_SCALING: tl.constexpr, STRIDED: tl.constexpr, GRAD_STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of one row from its saved (m, log sum), times its upstream gradient. Reads and writes the row once.

    The row covers `vocab` classes from `start` on, of `total`.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    grad_row_ptr = grad_ptr + row * grad_row_stride
    y = tl.load(target_ptr + row * target_stride).to(tl.int64)
    if y == ignore_index:
        _write_zeros(grad_row_ptr, grad_stride, vocab, GRAD_STRIDED, BLOCK)
        return
    in_range = (y >= 0) & (y < total)
    y -= start  # a class of another range is no column of this one
    maximum = tl.load(lse_ptr + row)
    log_sum = tl.load(lse_ptr + lse_stride + row)
    t = tl.where(in_range, tl.load(grad_loss_ptr + row * grad_loss_stride).to(tl.float32), float("nan"))
    if TOKEN_SCALING:
        column = tl.where((y >= 0) & (y < vocab), y, 0)
        target_logit = _capped(tl.load(row_ptr + column * logits_stride), logit_scale, softcap)
        t *= tl.exp2((target_logit - maximum - log_sum) * LOG2_E)
        tl.debug_barrier()  # the gradient may overwrite the logits: every warp has read this one first
    if logit_scale is not None:
        t *= logit_scale
    a, b, d = _coefficients(
        row, total, maximum, log_sum, t, target_weight_ptr, class_weight_sum_ptr, core_divisor_ptr, z_divisor_ptr,
        label_smoothing, lse_square_scale,
    )  # fmt: skip
    _write_gradient(
        row_ptr, logits_stride, grad_row_ptr, grad_stride, vocab, y, maximum, log_sum, a, b, d, logit_scale, softcap,
        class_weight_ptr, 0, SMOOTHING, STRIDED, GRAD_STRIDED, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=ONE_ELEMENT)
def scale_kernel(ptr, row_stride, stride, factor_ptr, rows, columns, STRIDED: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply a matrix by a 0-D factor, in fp32, rounded once; a few persistent programs that end at once if it is 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        row_ptr = ptr + row * row_stride
        for begin in range(0, columns, BLOCK):
            offsets = begin + tl.arange(0, BLOCK)
            x = _load(row_ptr, offsets, stride, columns, True, STRIDED, "evict_first")
            _store(row_ptr, offsets, stride, columns, x.to(tl.float32) * factor, True, STRIDED)
