/* ========================================================================== */
/* >>schedule                                      MARK: - schedule (private) */
/* Learning rates of steps.                                                   */
/* Needs: >>error.                                                            */
/* ========================================================================== */

/* Returns what a schedule lacks, as in "needs .total, its number of steps"; NULL: nothing. */
static TSHI_COLD const char *tshi_schedule_lacks(const tsh_schedule *s) {
    switch (s->kind) {
    case TSH_CONSTANT: return NULL;
    case TSH_LINEAR:
    case TSH_COSINE:
    case TSH_WSD: return s->total > 0 ? NULL : "needs .total, the number of steps";
    case TSH_ONE_CYCLE:
        return s->warmup ? "has its own warm-up, .pct_start, so .warmup must be 0"
               : s->pct_start < 0 || s->pct_start > 1 || s->div_factor < 0 ||
                       s->final_div_factor < 0
                   ? "needs .pct_start from 0 to 1, and no factor below 0"
               : s->total > 0 ? NULL
                              : "needs .total, the number of steps";
    case TSH_STEP: return s->period > 0 ? NULL : "needs .period, the steps between two changes";
    case TSH_EXPONENTIAL: return s->gamma > 0 ? NULL : "needs .gamma, the factor of each step";
    case TSH_LAMBDA: return s->factor ? NULL : "needs .factor, a function";
    default: return "is of a kind that there is not";
    }
}

/* Returns an error if a schedule lacks a field that its kind needs. op: the public function. */
static TSHI_COLD tsh_result tshi_schedule_check(tsh_ctx *ctx, const char *op,
                                                const tsh_schedule *s) {
    static const char *const names[] = {"TSH_CONSTANT", "TSH_LINEAR",      "TSH_COSINE",
                                        "TSH_STEP",     "TSH_EXPONENTIAL", "TSH_ONE_CYCLE",
                                        "TSH_WSD",      "TSH_LAMBDA"};
    const char *lacks = tshi_schedule_lacks(s);
    if (!lacks && !(s->lr >= TSH_ZERO && s->lr <= DBL_MAX)) lacks = "has no learning rate in .lr";
    if (!lacks) return TSH_OK;
    return tsh_fail(ctx, TSH_ERR_ARGUMENT, "%s: the schedule (kind %s) %s", op,
                    (unsigned)s->kind < sizeof names / sizeof names[0] ? names[s->kind] : "unknown",
                    lacks);
}

/* Interpolates between a (done 0) and b (done 1): along half a cosine or, if cosine is 0,
 * linearly. */
static double tshi_schedule_between(double a, double b, double done, int cosine) {
    if (cosine) done = 0.5 - 0.5 * cos(3.14159265358979324 * done);
    return a + (b - a) * done;
}

/* TSH_ONE_CYCLE: as torch's OneCycleLR, whose two parts end at steps pct_start total - 1 and
 * total - 1. */
static double tshi_schedule_one_cycle(const tsh_schedule *s, double step) {
    const double first = s->lr / (s->div_factor > 0 ? s->div_factor : 25);
    const double last = first / (s->final_div_factor > 0 ? s->final_div_factor : 1e4);
    const double end = (double)s->total - 1;
    const double peak = (s->pct_start > 0 ? s->pct_start : 0.3) * (double)s->total - 1;
    if (step <= peak && peak > 0) return tshi_schedule_between(first, s->lr, step / peak, 1);
    if (step >= end) return last;
    return tshi_schedule_between(s->lr, last, (step - peak) / (end - peak), 1);
}

/* TSH_WSD (warmup, stable, decay): the rate is lr until step total - decay, then falls to
 * lr_min. */
static double tshi_schedule_wsd(const tsh_schedule *s, double step) {
    const double span = s->decay > 0 ? (double)s->decay : (double)(s->total / 10);
    const double left = (double)s->total - step; /* steps until the end */
    if (left <= 0) return s->lr_min;
    if (left >= span) return s->lr;
    return tshi_schedule_between(s->lr, s->lr_min, 1 - left / span, s->shape == TSH_COSINE);
}

TSH_API double tsh_schedule_lr(const tsh_schedule *schedule, int64_t step) {
    const tsh_schedule *s = schedule;
    /* after: steps since the end of the warm-up; span: steps from there to .total */
    double after, span;
    if (!s) return 0;
    if (tshi_schedule_lacks(s)) return (double)NAN;
    if (step < 0) step = 0;
    if (step < s->warmup) return s->lr * (double)(step + 1) / (double)s->warmup;
    after = (double)step - (double)s->warmup;
    span = (double)s->total - (double)s->warmup;
    switch (s->kind) {
    case TSH_LINEAR:
    case TSH_COSINE:
        if (step >= s->total || span <= 0) return s->lr_min;
        return tshi_schedule_between(s->lr, s->lr_min, after / span, s->kind == TSH_COSINE);
    case TSH_STEP:
        return s->lr * pow(s->gamma > 0 ? s->gamma : 0.1, floor(after / (double)s->period));
    case TSH_EXPONENTIAL: return s->lr * pow(s->gamma, after);
    case TSH_ONE_CYCLE: return tshi_schedule_one_cycle(s, (double)step);
    case TSH_WSD: return tshi_schedule_wsd(s, (double)step);
    case TSH_LAMBDA: return s->lr * s->factor(s->warmup > 0 ? step - s->warmup : step, s->user);
    default: return s->lr;
    }
}

TSH_API double tsh_plateau_step(tsh_plateau *plateau, double metric) {
    tsh_plateau *p = plateau;
    const int64_t patience = !p ? 0 : p->patience ? (p->patience > 0 ? p->patience : 0) : 10;
    double margin, lr;
    if (!p) return 0;
    margin = tshi_base_option(p->threshold, 1e-4);
    if (!p->calls) p->best = p->largest ? -HUGE_VAL : HUGE_VAL;
    if (p->calls < INT64_MAX) p->calls++;
    if (p->largest ? metric > (p->absolute ? p->best + margin : p->best * (1 + margin))
                   : metric < (p->absolute ? p->best - margin : p->best * (1 - margin))) {
        p->best = metric;
        p->bad = 0;
    } else {
        if (p->bad < INT64_MAX) p->bad++;
    }
    if (p->cooling > 0) {
        p->cooling--;
        p->bad = 0;
    }
    if (p->bad <= patience) return p->lr;
    lr = fmax(p->lr * (p->factor > 0 ? p->factor : 0.1), p->lr_min);
    if (p->lr - lr > tshi_base_option(p->eps, 1e-8)) p->lr = lr;
    p->cooling = p->cooldown;
    p->bad = 0;
    return p->lr;
}
