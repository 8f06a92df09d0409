/* Attention's mask and cache, against the same written with matmul and softmax; grouped queries;
 * large scores. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

enum { B = 2, H = 4, T = 70, D = 5 };

static const double near_by = sizeof(tsh_real) == 4 ? 2e-6 : 1e-13; /* values are below 3 */

/* softmax(q k^T / sqrt D + mask) v. */
static tsh_tensor *plain(tsh_tensor *q, tsh_tensor *k, tsh_tensor *v, tsh_tensor *mask) {
    tsh_tensor *s = tsh_scale(tsh_matmul(q, tsh_transpose(k, 2, 3)), 1 / sqrt((double)D));
    return tsh_matmul(tsh_softmax(tsh_add(s, mask), -1), v);
}

/* The largest distance of two tensors, over all ranks' pieces. */
static double apart(tsh_ctx *ctx, tsh_tensor *a, tsh_tensor *b) {
    tsh_tensor *gap = tsh_sub(tsh_full_tensor(a), tsh_full_tensor(b));
    return tsh_item(ctx, tsh_max(tsh_sqrt(tsh_mul(gap, gap)), TSH_ALL, 0));
}

/* A mask of shape (B, 1, T, T) that hides key j from query i where (i + j + b) % 3 == 0, and
 * everything but itself where `far` is set. */
static tsh_tensor *hiding(tsh_ctx *ctx, tsh_tensor **whole) {
    tsh_real *add = (tsh_real *)calloc(B * T * T, sizeof *add);
    int32_t *keep = (int32_t *)calloc(B * T * T, sizeof *keep);
    tsh_tensor *mask;
    int64_t at = 0;
    for (int b = 0; b < B; b++)
        for (int i = 0; i < T; i++)
            for (int j = 0; j < T; j++, at++) {
                keep[at] = (i + j + b) % 3 != 0 && !(i == 7 && j > 3);
                add[at] = keep[at] ? 0 : (tsh_real)-1e30;
            }
    mask = tsh_tensor_from(ctx, TSH_I32, tsh_shape4(B, 1, T, T), tsh_replicated(), keep);
    *whole = tsh_tensor_from(ctx, TSH_REAL, tsh_shape4(B, 1, T, T), tsh_replicated(), add);
    free(add);
    free(keep);
    return mask;
}

static int mask_rank(tsh_ctx *ctx, void *user) {
    tsh_tensor *x[3], *local[3], *add, *mask = hiding(ctx, &add), *want, *got;
    double gap;
    (void)user;
    for (int i = 0; i < 3; i++) {
        x[i] = tsh_requires_grad(tsh_keep(tsh_randn(ctx, tsh_shape4(B, H, T, D))), 1);
        local[i] = tsh_redistribute(x[i], tsh_sharded(1));
    }
    want = plain(x[0], x[1], x[2], add);
    got = tsh_attention(local[0], local[1], local[2], &(tsh_attention_desc){.mask = mask});
    gap = apart(ctx, got, want);
    CHECK(gap < near_by, "an integer mask is off by %g", gap);
    got = tsh_attention(local[0], local[1], local[2], &(tsh_attention_desc){.mask = add});
    gap = apart(ctx, got, want);
    CHECK(gap < near_by, "an added mask is off by %g", gap);
    /* gradients of sum(y y) */
    tsh_tensor *grad[3];
    tsh_backward(ctx, tsh_sum(tsh_mul(want, want), TSH_ALL, 0));
    for (int i = 0; i < 3; i++) {
        grad[i] = tsh_keep(tsh_grad(x[i]));
        tsh_zero_grad(x[i]);
        local[i] = tsh_redistribute(x[i], tsh_sharded(1));
    }
    got = tsh_full_tensor(
        tsh_attention(local[0], local[1], local[2], &(tsh_attention_desc){.mask = mask}));
    tsh_backward(ctx, tsh_sum(tsh_mul(got, got), TSH_ALL, 0));
    for (int i = 0; i < 3; i++) {
        gap = apart(ctx, tsh_grad(x[i]), grad[i]);
        CHECK(gap < 4 * near_by, "the gradient of input %d is off by %g", i, gap);
    }
    CHECK_OK();
    return 0;
}

/* Causal, which works in strips, against the mask that says the same: fewer queries than keys and
 * more, so that the first ones see none; D of a whole block and a rest. */
static int causal_rank(tsh_ctx *ctx, void *user) {
    enum { WIDE = 40 };
    static const int64_t sizes[][2] = {{70, 70},  {33, 97}, {97, 33},
                                       {64, 128}, {1, 70},  {130, 129}};
    (void)user;
    for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
        const int64_t tq = sizes[c][0], tk = sizes[c][1];
        int32_t *sees = (int32_t *)calloc((size_t)(tq * tk), sizeof *sees);
        tsh_tensor *x[3], *mask, *y, *want[4];
        for (int i = 0; i < 3; i++)
            x[i] = tsh_requires_grad(tsh_keep(tsh_randn(ctx, tsh_shape4(1, H, i ? tk : tq, WIDE))),
                                     1);
        for (int64_t i = 0; i < tq; i++)
            for (int64_t j = 0; j < tk; j++) sees[i * tk + j] = j <= i + tk - tq;
        mask = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(tq, tk), tsh_replicated(), sees);
        free(sees);
        for (int causal = 0; causal < 2; causal++) {
            const tsh_attention_desc desc = {.causal = causal, .mask = causal ? NULL : mask};
            tsh_tensor *in[3];
            for (int i = 0; i < 3; i++) in[i] = tsh_redistribute(x[i], tsh_sharded(1));
            y = tsh_retain_grad(tsh_full_tensor(tsh_attention(in[0], in[1], in[2], &desc)));
            tsh_backward(ctx, tsh_sum(tsh_mul(y, y), TSH_ALL, 0));
            for (int i = 0; i < 4; i++) {
                tsh_tensor *got = i < 3 ? tsh_grad(x[i]) : y;
                double gap = causal ? apart(ctx, got, want[i]) : 0;
                if (!causal) want[i] = tsh_keep(got);
                CHECK(gap < 8 * near_by, "%ld queries, %ld keys: result %d is off by %g", (long)tq,
                      (long)tk, i, gap);
            }
            for (int i = 0; i < 3; i++) tsh_zero_grad(x[i]);
        }
    }
    CHECK_OK();
    return 0;
}

/* A query that sees no key gives 0 and no gradient. */
static int blind_rank(tsh_ctx *ctx, void *user) {
    static const int32_t nothing[2] = {0, 1};
    tsh_tensor *x = tsh_requires_grad(tsh_keep(tsh_randn(ctx, tsh_shape4(1, 1, 2, 3))), 1), *y;
    tsh_tensor *mask = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(2, 1), tsh_replicated(), nothing);
    tsh_real out[6], grad[6];
    (void)user;
    y = tsh_retain_grad(tsh_attention(x, x, x, &(tsh_attention_desc){.mask = mask}));
    tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0));
    tsh_read(ctx, y, TSH_LOCAL, out, sizeof out);
    tsh_read(ctx, tsh_grad(x), TSH_LOCAL, grad, sizeof grad);
    CHECK_OK();
    for (int i = 0; i < 3; i++) CHECK(!(out[i] < 0) && !(out[i] > 0), "a blind query gives 0");
    for (int i = 0; i < 6; i++) CHECK(isfinite((double)grad[i]), "gradients are finite");
    return 0;
}

/* Token by token through a cache equals all at once, causal. */
static int cache_rank(tsh_ctx *ctx, void *user) {
    tsh_layout heads = tsh_sharded(1);
    tsh_tensor *x[3], *want, *ck, *cv;
    double gap;
    (void)user;
    tsh_no_grad_begin(ctx);
    for (int i = 0; i < 3; i++)
        x[i] = tsh_redistribute(tsh_randn(ctx, tsh_shape4(B, H, T, D)), heads);
    ck = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(B, H, T, D), heads);
    cv = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(B, H, T, D), heads);
    want = tsh_attention(x[0], x[1], x[2], &(tsh_attention_desc){.causal = 1});
    for (int64_t at = 0, n; at < T; at += n) {
        n = at == 0 ? 3 : at == 3 ? 66 : 1; /* a prompt, a long piece, single tokens */
        tsh_tensor *y = tsh_attention(
            tsh_slice(x[0], 2, at, n), tsh_slice(x[1], 2, at, n), tsh_slice(x[2], 2, at, n),
            &(tsh_attention_desc){.causal = 1, .cache_k = ck, .cache_v = cv, .past = at});
        gap = apart(ctx, y, tsh_slice(want, 2, at, n));
        CHECK(gap < near_by, "at position %d the cache is off by %g", (int)at, gap);
    }
    CHECK_OK();
    (void)tsh_attention(x[0], x[1], x[2],
                        &(tsh_attention_desc){.cache_k = ck, .cache_v = cv, .past = 1});
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_SHAPE &&
              strstr(tsh_last_error(ctx)->message, "position 1 does not go into the cache"),
          "a full cache is an error");
    tsh_clear_error(ctx);
    tsh_no_grad_end(ctx);
    return 0;
}

/* Each head of x (B, H / 2, T, D) twice. */
static tsh_tensor *doubled(tsh_tensor *x) {
    tsh_tensor *part[H];
    for (int h = 0; h < H; h++) part[h] = tsh_slice(x, 1, h / 2, 1);
    return tsh_concat(part, H, 1);
}

/* Grouped queries through a cache: k and v cut by whole groups (user 0), or replicated (1). */
static int grouped_cache_rank(tsh_ctx *ctx, void *user) {
    tsh_layout whole = tsh_shard_units(1, 2), heads = tsh_sharded(1), all = tsh_replicated();
    const tsh_layout *kv = *(const int *)user ? &all : &heads;
    tsh_tensor *q, *k, *v, *want, *ck, *cv;
    double gap;
    tsh_no_grad_begin(ctx);
    q = tsh_randn(ctx, tsh_shape4(B, H, T, D));
    k = tsh_randn(ctx, tsh_shape4(B, H / 2, T, D));
    v = tsh_randn(ctx, tsh_shape4(B, H / 2, T, D));
    want = tsh_attention(q, doubled(k), doubled(v), &(tsh_attention_desc){.causal = 1});
    q = tsh_redistribute(q, *(const int *)user ? heads : whole);
    k = tsh_redistribute(k, *kv);
    v = tsh_redistribute(v, *kv);
    ck = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(B, H / 2, T, D), *kv);
    cv = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(B, H / 2, T, D), *kv);
    for (int64_t at = 0, n; at < T; at += n) {
        n = at == 0 ? 67 : 1;
        tsh_tensor *y = tsh_attention(
            tsh_slice(q, 2, at, n), tsh_slice(k, 2, at, n), tsh_slice(v, 2, at, n),
            &(tsh_attention_desc){.causal = 1, .cache_k = ck, .cache_v = cv, .past = at});
        gap = apart(ctx, y, tsh_slice(want, 2, at, n));
        CHECK(gap < near_by, "at position %d the cache is off by %g", (int)at, gap);
    }
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void grouped_queries_through_a_cache(void **state) {
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++)
        for (int replicated = 0; replicated < 2; replicated++)
            ranks_run(ranks_degrees[p], grouped_cache_rank, &replicated);
}

/* Replicated k and v with fewer heads than ranks, whose gradients are first written by attention:
 * heads that a rank's queries do not use give 0, also where memory of the step before is reused. */
static int few_heads_rank(tsh_ctx *ctx, void *user) {
    enum { LONG = 140, WIDE = 16 };
    const tsh_dtype dtype = *(const tsh_dtype *)user;
    const double near = dtype == TSH_BF16 ? 1.0 / 64 : 1e-5; /* of the largest gradient */
    const tsh_attention_desc causal = {.causal = 1};
    tsh_tensor *x[3], *in[3], *want[3], *by;
    for (int i = 0; i < 3; i++) {
        x[i] = tsh_randn(ctx, tsh_shape4(B, i ? H / 2 : H, LONG, WIDE));
        x[i] = tsh_requires_grad(tsh_keep(tsh_cast(x[i], dtype)), 1);
    }
    by = tsh_keep(tsh_randn(ctx, tsh_shape4(B, H, LONG, WIDE)));
    for (int round = 0; round < 4; round++) { /* round 0: all heads on every rank */
        /* copies: their gradients are in memory of the step */
        for (int i = 0; i < 3; i++) in[i] = tsh_scale(x[i], 1);
        if (round) in[0] = tsh_redistribute(in[0], tsh_sharded(1));
        in[0] = tsh_full_tensor(tsh_attention(in[0], in[1], in[2], &causal));
        tsh_backward(ctx, tsh_sum(tsh_mul(tsh_cast(in[0], TSH_REAL), by), TSH_ALL, 0));
        for (int i = 0; i < 3; i++) {
            tsh_tensor *zero = tsh_zeros(ctx, tsh_shape_of(x[i]));
            if (!round) want[i] = tsh_keep(tsh_clone(tsh_grad(x[i])));
            const double gap = apart(ctx, tsh_grad(x[i]), want[i]);
            const double most = apart(ctx, want[i], zero);
            CHECK(gap <= near * most, "round %d: the gradient of input %d is off by %g of %g",
                  round, i, gap, most);
            tsh_zero_grad(x[i]);
        }
        tsh_step_end(ctx);
    }
    CHECK_OK();
    return 0;
}

static void gradients_of_fewer_heads_than_ranks(void **state) {
    static const tsh_dtype dtypes[] = {TSH_REAL, TSH_BF16};
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int t = 0; t < COUNT(dtypes); t++) {
            tsh_dtype dtype = dtypes[t];
            ranks_run(ranks, few_heads_rank, &dtype);
        }
}

/* Scores of 10^4 and 10^4 + log 3: p is 1/4 and 3/4, not what is left of them beside 10^4. */
static int steep_rank(tsh_ctx *ctx, void *user) {
    const tsh_real keys[2] = {100, (tsh_real)(100 + log(3.0) / 128)}, values[2] = {1, 2};
    tsh_tensor *q = tsh_keep(tsh_full(ctx, tsh_shape4(1, 1, 1, 1), 128));
    tsh_tensor *k = tsh_tensor_from(ctx, TSH_REAL, tsh_shape4(1, 1, 2, 1), tsh_replicated(), keys);
    tsh_tensor *v = tsh_tensor_from(ctx, TSH_REAL, tsh_shape4(1, 1, 2, 1), tsh_replicated(),
                                    values);
    tsh_real dv[2], dk[2], gap = keys[1] - keys[0];
    double p = 1 / (1 + exp(-128 * (double)gap));
    (void)user;
    tsh_requires_grad(v, 1);
    tsh_requires_grad(k, 1);
    tsh_backward(ctx,
                 tsh_sum(tsh_attention(q, k, v, &(tsh_attention_desc){.scale = 1}), TSH_ALL, 0));
    tsh_read(ctx, tsh_grad(v), TSH_LOCAL, dv, sizeof dv);
    tsh_read(ctx, tsh_grad(k), TSH_LOCAL, dk, sizeof dk);
    CHECK_OK();
    /* the difference of the scores is exact: only exp and log round, log S of 1 to 4 eps */
    CHECK(fabs((double)dv[0] - (1 - p)) < near_by / 4, "dv is %.9g, not %.9g", (double)dv[0],
          1 - p);
    CHECK(fabs((double)dv[1] - p) < near_by / 4, "dv is %.9g, not %.9g", (double)dv[1], p);
    CHECK(fabs((double)dk[1] - 128 * p * (1 - p)) < 64 * near_by, "dk is %.9g", (double)dk[1]);
    return 0;
}

static void gradients_at_scores_of_ten_thousand(void **state) {
    (void)state;
    ranks_run(1, steep_rank, NULL);
}

/* A score of +infinity or NaN makes its query's row NaN, and the gradient of what it saw; the other
 * query stays as it is. In the first tile of keys or in the last, one NaN or several. */
static int broken_rank(tsh_ctx *ctx, void *user) {
    enum { KEYS = 150 };
    static const int64_t places[] = {0, 40, 100, KEYS - 1};
    (void)user;
    for (int c = 0; c < 2 * COUNT(places); c++) {
        tsh_real scores[2 * KEYS] = {0}, y[2], dq[2], dv[KEYS];
        tsh_tensor *x[3], *mask, *out;
        const int64_t bad = places[c / 2];
        scores[KEYS + bad] = (tsh_real)(c % 2 ? NAN : INFINITY);
        if (c > COUNT(places)) scores[KEYS + bad / 2] = scores[KEYS + bad];
        for (int i = 0; i < 3; i++)
            x[i] = tsh_requires_grad(
                tsh_keep(tsh_full(ctx, tsh_shape4(1, 1, i ? KEYS : 2, 1), 1)), 1);
        mask = tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(2, KEYS), tsh_replicated(), scores);
        out = tsh_retain_grad(tsh_attention(x[0], x[1], x[2], &(tsh_attention_desc){.mask = mask}));
        tsh_backward(ctx, tsh_sum(out, TSH_ALL, 0));
        tsh_read(ctx, out, TSH_LOCAL, y, sizeof y);
        tsh_read(ctx, tsh_grad(x[0]), TSH_LOCAL, dq, sizeof dq);
        tsh_read(ctx, tsh_grad(x[2]), TSH_LOCAL, dv, sizeof dv);
        CHECK(fabs((double)y[0] - 1) < near_by, "case %d: query 0 gives %g", c, (double)y[0]);
        CHECK(fabs((double)dq[0]) < near_by, "case %d: query 0 gets %g", c, (double)dq[0]);
        CHECK(isnan(y[1]), "case %d: query 1 gives %g", c, (double)y[1]);
        CHECK(isnan(dq[1]), "case %d: query 1 gets %g", c, (double)dq[1]);
        for (int i = 0; i < KEYS; i++)
            CHECK(isnan(dv[i]), "case %d: value %d gets %g", c, i, (double)dv[i]);
    }
    CHECK_OK();
    return 0;
}

static void a_score_that_is_not_finite_is_seen(void **state) {
    (void)state;
    ranks_run(1, broken_rank, NULL);
}

/* An error leaves the caches as they were; what belongs to another ctx is noticed. */
static int refused_rank(tsh_ctx *ctx, void *user) {
    tsh_tensor *x, *mask, *ck, *cv, *strange;
    tsh_real held[6];
    tsh_ctx *other = NULL;
    (void)user;
    tsh_no_grad_begin(ctx);
    x = tsh_ones(ctx, tsh_shape4(1, 1, 2, 3));
    ck = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(1, 1, 2, 3), tsh_replicated());
    cv = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(1, 1, 2, 3), tsh_replicated());
    mask = tsh_ones(ctx, tsh_shape2(2, 5));
    CHECK(
        !tsh_attention(x, x, x, &(tsh_attention_desc){.mask = mask, .cache_k = ck, .cache_v = cv}),
        "a mask that does not fit");
    CHECK(strstr(tsh_last_error(ctx)->message, "mask f") != NULL, "it says so");
    tsh_clear_error(ctx);
    strange = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(1, 1, 1, 3), tsh_replicated());
    CHECK(!tsh_attention(x, x, x, &(tsh_attention_desc){.cache_k = ck, .cache_v = strange}),
          "a cache that is too short");
    tsh_clear_error(ctx);
    tsh_read(ctx, ck, TSH_LOCAL, held, sizeof held);
    for (int i = 0; i < 6; i++) CHECK(fabs((double)held[i]) < 1e-9, "the cache was written");
    CHECK(tsh_open(NULL, &other) == TSH_OK, "another ctx");
    for (int i = 0; i < 3; i++) {
        static const char *const strange_names[] = {": mask belongs to another ctx",
                                                    ": cache_k belongs to another ctx",
                                                    ": cache_v belongs to another ctx"};
        tsh_attention_desc desc = {.cache_k = ck, .cache_v = cv};
        if (i == 0) desc.mask = tsh_ones(other, tsh_shape2(2, 2));
        strange = tsh_tensor_new(other, TSH_REAL, tsh_shape4(1, 1, 2, 3), tsh_replicated());
        if (i == 1) desc.cache_k = strange;
        if (i == 2) desc.cache_v = strange;
        CHECK(!tsh_attention(x, x, x, &desc), "number %d", i);
        CHECK(strstr(tsh_last_error(ctx)->message, strange_names[i]), "%d", i);
        tsh_clear_error(ctx);
    }
    tsh_close(other);
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void what_is_refused_changes_no_cache(void **state) {
    (void)state;
    ranks_run(1, refused_rank, NULL);
}

static void masks_equal_the_plain_formula(void **state) {
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++) ranks_run(ranks_degrees[p], mask_rank, NULL);
}

static void causal_equals_its_mask(void **state) {
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++) ranks_run(ranks_degrees[p], causal_rank, NULL);
}

static void a_query_that_sees_nothing_gives_zero(void **state) {
    (void)state;
    ranks_run(1, blind_rank, NULL);
}

static void a_cache_equals_all_at_once(void **state) {
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++) ranks_run(ranks_degrees[p], cache_rank, NULL);
}

/* ------------------------------------------------------- against double precision */

/* An attention computed in double from what the tensors hold. */
typedef struct exact {
    int64_t b, h, hk, tq, tk, d;
    double *x[3], *dout;  /* q, k, v, and the gradient of the output */
    double *out, *grad[3];
    int causal, masked;   /* masked: key j is hidden from query i where (i + 2 j + head) % 5 == 0 */
    int64_t window;
    double cap;
    double *bias, *bias_grad;   /* (H, Tq, Tk), or NULL; its gradient */
    double *sinks, *sink_grad;  /* (H), or NULL */
} exact;

static double *doubles(tsh_ctx *ctx, tsh_tensor *t) {
    double *values;
    t = tsh_cast(t, TSH_REAL);
    values = ranks_values(ctx, t);
    return values;
}

static int exact_sees(const exact *e, int64_t head, int64_t i, int64_t j) {
    const int64_t at = i + e->tk - e->tq;
    if (e->window && (at - j >= e->window || (!e->causal && j - at >= e->window))) return 0;
    return !(e->causal && j > at) && !(e->masked && (i + 2 * j + head) % 5 == 0);
}

/* One query: its row of out, and what it adds to the gradients. */
static void exact_row(const exact *e, int64_t b, int64_t a, int64_t i, double *p) {
    double *slope = p + e->tk; /* of the soft cap */
    const int64_t d = e->d, c = a / (e->h / e->hk), at = ((b * e->h + a) * e->tq + i) * d;
    const double *q = e->x[0] + at, *k = e->x[1] + (b * e->hk + c) * e->tk * d;
    const double *v = e->x[2] + (b * e->hk + c) * e->tk * d, *g = e->dout + at;
    const double *bias = e->bias ? e->bias + (a * e->tq + i) * e->tk : NULL;
    double most = -(double)INFINITY, sum = 0, delta = 0, scale = 1 / sqrt((double)d);
    for (int64_t j = 0; j < e->tk; j++) {
        p[j] = -(double)INFINITY;
        if (!exact_sees(e, a, i, j)) continue;
        p[j] = 0;
        for (int64_t f = 0; f < d; f++) p[j] += scale * q[f] * k[j * d + f];
        if (e->cap > 0) p[j] = e->cap * tanh(p[j] / e->cap);
        slope[j] = e->cap > 0 ? 1 - p[j] / e->cap * (p[j] / e->cap) : 1;
        if (bias) p[j] += bias[j];
        most = fmax(most, p[j]);
    }
    if (e->sinks) most = fmax(most, e->sinks[a]);
    if (isinf(most)) return; /* it sees no key */
    for (int64_t j = 0; j < e->tk; j++) sum += p[j] = exp(p[j] - most);
    if (e->sinks) sum += exp(e->sinks[a] - most);
    for (int64_t j = 0; j < e->tk; j++) {
        p[j] /= sum;
        for (int64_t f = 0; f < d; f++) e->out[at + f] += p[j] * v[j * d + f];
    }
    for (int64_t f = 0; f < d; f++) delta += g[f] * e->out[at + f];
    if (e->sinks) e->sink_grad[a] -= exp(e->sinks[a] - most) / sum * delta;
    for (int64_t j = 0; j < e->tk; j++) {
        const int64_t to = (b * e->hk + c) * e->tk * d + j * d;
        double ds = -delta;
        for (int64_t f = 0; f < d; f++) ds += g[f] * v[j * d + f];
        ds *= p[j];
        if (bias && p[j] > 0) e->bias_grad[bias + j - e->bias] += ds;
        ds *= scale * slope[j];
        for (int64_t f = 0; f < d; f++) {
            e->grad[0][at + f] += ds * k[j * d + f];
            e->grad[1][to + f] += ds * q[f];
            e->grad[2][to + f] += p[j] * g[f];
        }
    }
}

/* The largest distance from `want`, as a part of its largest magnitude (or 1). */
static double off_by(const double *got, const double *want, int64_t n) {
    double gap = 0, most = 1;
    for (int64_t e = 0; e < n; e++) {
        gap = isnan(got[e]) ? (double)INFINITY : fmax(gap, fabs(got[e] - want[e]));
        most = fmax(most, fabs(want[e]));
    }
    return gap / most;
}

/* B, H, Hkv, Tq, Tk, D, causal, masked, window, soft cap in tenths, bias, sinks: borders of tiles
 * (96 queries, 128 keys, 12 or fewer rows, 32 columns) and of the widths of micro-kernels, one more
 * and one less. */
static const int exact_cases[][12] = {
    {1, 1, 1, 1, 1, 1, 0, 0},       {2, 2, 1, 12, 128, 33, 0, 0},   {1, 2, 2, 13, 129, 31, 0, 1},
    {1, 4, 2, 96, 127, 64, 1, 0},   {1, 3, 1, 97, 97, 65, 1, 1},    {1, 1, 1, 95, 257, 17, 1, 0},
    {1, 2, 1, 193, 255, 40, 1, 1},  {1, 2, 2, 130, 90, 16, 1, 0},   {2, 8, 2, 1, 300, 64, 1, 1},
    {1, 8, 1, 1, 129, 7, 0, 0},     {1, 40, 2, 1, 65, 80, 1, 0},    {1, 2, 1, 24, 31, 5, 1, 0},
    {1, 1, 1, 300, 300, 128, 1, 0}, {1, 1, 1, 5, 140, 400, 1, 0},   {1, 1, 1, 2, 33, 3, 0, 1},
    /* windows: of one key, below and above a tile, no multiple of one, as long as all, longer */
    {1, 2, 1, 130, 130, 16, 1, 0, 1},      {2, 2, 1, 300, 300, 24, 1, 0, 40},
    {1, 4, 2, 290, 520, 16, 1, 0, 129},    {1, 2, 1, 600, 600, 8, 1, 0, 256},
    {1, 2, 2, 97, 97, 16, 1, 0, 97},       {1, 2, 2, 97, 97, 16, 1, 0, 1000},
    {1, 2, 1, 400, 400, 8, 0, 0, 33},      {1, 2, 1, 1, 700, 16, 1, 0, 100},
    {1, 8, 2, 1, 513, 16, 0, 0, 1},        {1, 4, 2, 7, 700, 16, 1, 0, 130},
    {1, 2, 1, 300, 120, 16, 1, 0, 50},     {1, 2, 1, 300, 120, 16, 0, 1, 50},
    /* caps, biases with gradient, sinks */
    {1, 2, 1, 130, 130, 16, 1, 0, 0, 15},  {1, 8, 2, 1, 300, 16, 1, 1, 0, 10},
    {2, 4, 2, 97, 129, 24, 0, 0, 0, 0, 1}, {1, 4, 1, 1, 70, 8, 0, 0, 0, 0, 1},
    {2, 4, 2, 130, 130, 16, 1, 0, 0, 0, 0, 1}, {2, 8, 2, 1, 129, 16, 1, 0, 0, 0, 0, 1},
    {1, 3, 1, 300, 120, 16, 1, 0, 0, 0, 0, 1},
    {2, 4, 2, 300, 300, 16, 1, 0, 60, 12, 1, 1}, {1, 4, 2, 5, 300, 16, 1, 0, 20, 12, 1, 1},
    {2, 2, 1, 140, 140, 33, 0, 0, 30, 20, 1, 1},
};

static tsh_tensor *exact_mask(tsh_ctx *ctx, const exact *e) {
    int32_t *keep = (int32_t *)calloc((size_t)(e->h * e->tq * e->tk), sizeof *keep);
    tsh_tensor *mask;
    int64_t at = 0;
    for (int64_t a = 0; a < e->h; a++)
        for (int64_t i = 0; i < e->tq; i++)
            for (int64_t j = 0; j < e->tk; j++, at++) keep[at] = (i + 2 * j + a) % 5 != 0;
    mask = tsh_tensor_from(ctx, TSH_I32, tsh_shape4(1, e->h, e->tq, e->tk), tsh_replicated(), keep);
    free(keep);
    return mask;
}

/* Output and gradients of one case in one dtype. Of 16 bits the output is rounded, and so may be p,
 * dS and dO: their relative errors are 2^-9 (bf16), 2^-12 (f16, of the output alone). */
static int exact_case(tsh_ctx *ctx, const int *c, tsh_dtype dtype) {
    const double eps = dtype == TSH_BF16 ? 1.0 / 256 : dtype == TSH_F16 ? 1.0 / 2048 : 4 * near_by;
    exact e = {c[0], c[1], c[2], c[3], c[4], c[5], {NULL, NULL, NULL}, NULL, NULL,
               {NULL, NULL, NULL}, c[6], c[7], c[8], c[9] / 10.0, NULL, NULL, NULL, NULL};
    tsh_tensor *more[2] = {NULL, NULL}; /* bias, sinks */
    const int64_t counts[2] = {c[1] * c[3] * c[4], c[1]};
    const int64_t count[2] = {e.b * e.h * e.tq * e.d, e.b * e.hk * e.tk * e.d};
    tsh_tensor *x[3], *out, *g;
    tsh_attention_desc desc = {.causal = e.causal, .window = e.window, .soft_cap = e.cap};
    double *got, gap, *p = (double *)calloc((size_t)(2 * e.tk), sizeof *p);
    for (int i = 0; i < 3; i++) {
        tsh_shape shape = i ? tsh_shape4(e.b, e.hk, e.tk, e.d) : tsh_shape4(e.b, e.h, e.tq, e.d);
        x[i] = tsh_keep(tsh_cast(tsh_randn(ctx, shape), dtype));
        e.x[i] = doubles(ctx, x[i]);
        e.grad[i] = (double *)calloc((size_t)count[i > 0], sizeof(double));
        tsh_requires_grad(x[i], 1);
    }
    g = tsh_keep(tsh_randn(ctx, tsh_shape4(e.b, e.h, e.tq, e.d)));
    e.dout = doubles(ctx, g);
    e.out = (double *)calloc((size_t)count[0], sizeof(double));
    if (c[10]) more[0] = tsh_randn(ctx, tsh_shape3(e.h, e.tq, e.tk));
    if (c[11]) more[1] = tsh_randn(ctx, tsh_shape1(e.h));
    for (int i = 0; i < 2; i++)
        if (more[i]) more[i] = tsh_requires_grad(tsh_keep(tsh_cast(more[i], dtype)), 1);
    if (more[0]) e.bias = doubles(ctx, more[0]);
    if (more[0]) e.bias_grad = (double *)calloc((size_t)counts[0], sizeof(double));
    if (more[1]) e.sinks = doubles(ctx, more[1]);
    if (more[1]) e.sink_grad = (double *)calloc((size_t)counts[1], sizeof(double));
    for (int64_t r = 0; r < e.b * e.h * e.tq; r++)
        exact_row(&e, r / e.tq / e.h, r / e.tq % e.h, r % e.tq, p);
    desc.mask = e.masked ? exact_mask(ctx, &e) : more[0];
    desc.sinks = more[1];
    out = tsh_retain_grad(tsh_attention(x[0], x[1], x[2], &desc));
    CHECK(out && tsh_dtype_of(out) == dtype, "the output has q's dtype");
    tsh_backward(ctx, tsh_sum(tsh_mul(tsh_cast(out, TSH_REAL), g), TSH_ALL, 0));
    CHECK_OK();
    for (int i = 0; i < 4; i++) {
        got = doubles(ctx, i < 3 ? tsh_grad(x[i]) : out);
        gap = off_by(got, i < 3 ? e.grad[i] : e.out, count[i == 1 || i == 2]);
        CHECK(gap < (i < 3 ? 4 : 1) * eps, "%s, (%d, %d, %d, %d, %d, %d): result %d is off by %g",
              dtype == TSH_BF16  ? "bf16"
              : dtype == TSH_F16 ? "f16"
                                 : "real",
              c[0], c[1], c[2], c[3], c[4], c[5], i, gap);
        free(got);
    }
    for (int i = 0; i < 2; i++) {
        if (!more[i]) continue;
        got = doubles(ctx, tsh_grad(more[i]));
        gap = off_by(got, i ? e.sink_grad : e.bias_grad, counts[i]);
        CHECK(gap < 4 * eps, "dtype %d, (%d, %d, %d, %d, %d, %d): the gradient of %s is off by %g",
              (int)dtype, c[0], c[1], c[2], c[3], c[4], c[5], i ? "sinks" : "a bias", gap);
        free(got);
        tsh_tensor_free(more[i]);
    }
    free(e.bias);
    free(e.bias_grad);
    free(e.sinks);
    free(e.sink_grad);
    for (int i = 0; i < 3; i++) {
        tsh_tensor_free(x[i]);
        free(e.x[i]);
        free(e.grad[i]);
    }
    tsh_tensor_free(g);
    free(e.dout);
    free(e.out);
    free(p);
    tsh_step_end(ctx);
    return 0;
}

static int exact_rank(tsh_ctx *ctx, void *user) {
    static const tsh_dtype dtypes[] = {TSH_F32, TSH_BF16, TSH_F16};
    (void)user;
    for (int c = 0; c < COUNT(exact_cases); c++)
        for (int i = 0; i < COUNT(dtypes); i++)
            if (exact_case(ctx, exact_cases[c], i ? dtypes[i] : TSH_REAL)) return 1;
    return 0;
}

static void borders_of_tiles_in_every_dtype(void **state) {
    (void)state;
    ranks_run(1, exact_rank, NULL);
}

/* A cache of 16 bits holds k and v rounded; q stays as it is. The same bits, whether a query comes
 * alone or with others. */
static int short_cache_rank(tsh_ctx *ctx, void *user) {
    static const tsh_dtype dtypes[] = {TSH_BF16, TSH_F16};
    enum { WIDE = 20, KEYS = 261 };
    (void)user;
    tsh_no_grad_begin(ctx);
    for (int c = 0; c < 2 * COUNT(dtypes); c++) {
        const tsh_dtype held = dtypes[c / 2], given = c % 2 ? held : TSH_REAL;
        tsh_tensor *x[3], *want, *ck, *cv, *whole[2];
        double gap;
        for (int i = 0; i < 3; i++)
            x[i] = tsh_cast(tsh_randn(ctx, tsh_shape4(1, i ? 2 : 4, KEYS, WIDE)), given);
        ck = tsh_tensor_new(ctx, held, tsh_shape4(1, 2, KEYS, WIDE), tsh_replicated());
        cv = tsh_tensor_new(ctx, held, tsh_shape4(1, 2, KEYS, WIDE), tsh_replicated());
        for (int i = 0; i < 2; i++) whole[i] = tsh_cast(tsh_cast(x[i + 1], held), given);
        want = tsh_attention(x[0], whole[0], whole[1], &(tsh_attention_desc){.causal = 1});
        for (int64_t at = 0, n; at < KEYS; at += n) {
            n = at == 0 ? 250 : 1;
            tsh_tensor *y = tsh_attention(
                tsh_slice(x[0], 2, at, n), tsh_slice(x[1], 2, at, n), tsh_slice(x[2], 2, at, n),
                &(tsh_attention_desc){.causal = 1, .cache_k = ck, .cache_v = cv, .past = at});
            CHECK(y && tsh_dtype_of(y) == given, "the output has q's dtype");
            gap = apart(ctx, tsh_cast(y, TSH_REAL),
                        tsh_cast(tsh_slice(want, 2, at, n), TSH_REAL));
            CHECK(!(gap > 0), "case %d, position %d: other bits, by %g", c, (int)at, gap);
        }
        tsh_step_end(ctx);
    }
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void a_cache_of_16_bits(void **state) {
    (void)state;
    ranks_run(1, short_cache_rank, NULL);
}

/* Bits do not depend on what else is computed: a head alone, a batch alone, on one thread or three.
 */
static int alone_rank(tsh_ctx *ctx, void *user) {
    static const tsh_dtype dtypes[] = {TSH_F32, TSH_BF16};
    double **kept = (double **)user; /* of the first run */
    for (int c = 0; c < COUNT(dtypes); c++) {
        tsh_tensor *x[3], *y, *one;
        double *got;
        for (int i = 0; i < 3; i++)
            x[i] = tsh_keep(tsh_cast(tsh_randn(ctx, tsh_shape4(2, i ? 2 : 4, 210, 48)),
                                     c ? dtypes[c] : TSH_REAL));
        y = tsh_attention(x[0], x[1], x[2], &(tsh_attention_desc){.causal = 1});
        got = doubles(ctx, y);
        if (!kept[c]) kept[c] = doubles(ctx, y);
        CHECK(memcmp(got, kept[c], (size_t)tsh_numel(y) * sizeof *got) == 0, "other threads");
        for (int b = 0; b < 2; b++)
            for (int a = 0; a < 4; a++) {
                tsh_tensor *in[3];
                for (int i = 0; i < 3; i++)
                    in[i] = tsh_slice(tsh_slice(x[i], 0, b, 1), 1, i ? a / 2 : a, 1);
                one = tsh_attention(in[0], in[1], in[2], &(tsh_attention_desc){.causal = 1});
                double *few = doubles(ctx, one);
                CHECK(memcmp(few, got + (b * 4 + a) * 210 * 48, 210 * 48 * sizeof *got) == 0,
                      "head %d of batch %d alone has other bits", a, b);
                free(few);
            }
        free(got);
    }
    CHECK_OK();
    return 0;
}

static void a_head_alone_has_the_same_bits(void **state) {
    double *kept[2] = {NULL, NULL};
    (void)state;
    for (int threads = 1; threads <= 3; threads++) {
        const tsh_desc desc = {.threads = threads, .seed = 3};
        ranks_run_with(1, &desc, alone_rank, kept);
    }
    free(kept[0]);
    free(kept[1]);
}

/* ------------------------------------------------------------------- ragged batches */

enum { ROWS = 3, MOST = 300, WIDTH = 24 };

/* How a ragged batch is laid out. */
typedef struct ragged {
    tsh_dtype dtype;
    int layout; /* 0: q, k, v by heads; 1: k and v whole; 2: by batch */
} ragged;

/* x laid out as said: queries if i is 0, else keys or values. */
static tsh_tensor *ragged_laid(const ragged *r, tsh_tensor *x, int i) {
    if (r->layout == 2) return tsh_redistribute(x, tsh_sharded(0));
    if (i && r->layout == 1) return x;
    return tsh_redistribute(x, i || r->layout == 1 ? tsh_sharded(1) : tsh_shard_units(1, 2));
}

/* Steps of rows with a length each, the last ones without lengths. A row gives the bits that it
 * gives in a batch of its own, with a cache of its own. */
static int ragged_rank(tsh_ctx *ctx, void *user) {
    static const int64_t tokens[] = {70, 5, 1, 1, 200, 1, 13};
    static const int64_t given[][ROWS] = {{70, 3, 41}, {1, 5, 0}, {1, 1, 1}, {0, 1, 1},
                                          {2, 200, 1}, {1, 1, 1}, {13, 2, 7}};
    const ragged *r = (const ragged *)user;
    const ragged alone = {r->dtype, 0};
    tsh_tensor *cache[2], *own[ROWS][2];
    int64_t pasts[ROWS] = {0};
    tsh_no_grad_begin(ctx);
    for (int i = 0; i < 2; i++) {
        tsh_tensor *zero = tsh_zeros(ctx, tsh_shape4(ROWS, H / 2, MOST, WIDTH));
        const tsh_layout layout = tsh_layout_of(ragged_laid(r, zero, 1));
        cache[i] = tsh_tensor_new(ctx, r->dtype, tsh_shape_of(zero), layout);
        for (int b = 0; b < ROWS; b++) {
            const tsh_layout heads = tsh_sharded(1);
            own[b][i] = tsh_tensor_new(ctx, r->dtype, tsh_shape4(1, H / 2, MOST, WIDTH), heads);
        }
    }
    for (int s = 0; s < COUNT(tokens); s++) {
        const int all = tokens[s] == 1 && given[s][0] == 1; /* lengths would say nothing */
        tsh_tensor *x[3], *in[3], *y;
        for (int i = 0; i < 3; i++) {
            x[i] = tsh_randn(ctx, tsh_shape4(ROWS, i ? H / 2 : H, tokens[s], WIDTH));
            x[i] = tsh_cast(x[i], r->dtype);
            in[i] = ragged_laid(r, x[i], i);
        }
        y = tsh_full_tensor(tsh_attention(in[0], in[1], in[2],
                                   &(tsh_attention_desc){.causal = 1, .cache_k = cache[0],
                                                         .cache_v = cache[1], .pasts = pasts,
                                                         .lengths = all ? NULL : given[s]}));
        CHECK(y, "step %d", s);
        for (int b = 0; b < ROWS; b++) {
            const tsh_attention_desc desc = {.causal = 1, .cache_k = own[b][0],
                                             .cache_v = own[b][1], .past = pasts[b]};
            const int64_t n = given[s][b];
            tsh_tensor *row[3], *want;
            if (!n) continue;
            for (int i = 0; i < 3; i++)
                row[i] = ragged_laid(&alone, tsh_slice(tsh_slice(x[i], 0, b, 1), 2, 0, n), i);
            want = tsh_attention(row[0], row[1], row[2], &desc);
            const double gap = apart(ctx, tsh_cast(want, TSH_REAL),
                                     tsh_cast(tsh_slice(tsh_slice(y, 0, b, 1), 2, 0, n), TSH_REAL));
            CHECK(gap <= 0, "step %d, row %d: other bits, by %g", s, b, gap);
            pasts[b] += n;
        }
        tsh_step_end(ctx);
    }
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void a_row_of_a_ragged_batch_has_the_bits_of_it_alone(void **state) {
    static const tsh_dtype dtypes[] = {TSH_REAL, TSH_BF16, TSH_F16};
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++)
        for (int t = 0; t < COUNT(dtypes); t++)
            for (int layout = 0; layout < 3; layout++) {
                ragged r = {dtypes[t], layout};
                ranks_run(ranks_degrees[p], ragged_rank, &r);
            }
}

/* Padded keys of a batch without a cache, as of an encoder (causal 0), with gradients: those of a
 * row alone, and 0 for padding. Twice, so that memory of the step before is reused. */
static int padded_rank(tsh_ctx *ctx, void *user) {
    enum { LONG = 140 };
    static const int64_t lengths[ROWS] = {LONG, 37, 0};
    const ragged *r = (const ragged *)user;
    /* gradients of bf16 activations, below 16, are sent in bf16; of whole k and v they are sums */
    const double sent = r->dtype == TSH_BF16 && tsh_tp(ctx)->size > 1 ? 1.0 / 16 : 0;
    tsh_tensor *x[3], *by = tsh_keep(tsh_randn(ctx, tsh_shape4(ROWS, H, LONG, WIDTH)));
    for (int i = 0; i < 3; i++)
        x[i] = tsh_requires_grad(
            tsh_keep(tsh_cast(tsh_randn(ctx, tsh_shape4(ROWS, i ? H / 2 : H, LONG, WIDTH)),
                              r->dtype)), 1);
    for (int c = 0; c < 4; c++) {
        const int causal = c % 2;
        const tsh_attention_desc desc = {.causal = causal, .lengths = lengths};
        tsh_tensor *in[3], *y, *got[4];
        for (int i = 0; i < 3; i++) in[i] = ragged_laid(r, tsh_scale(x[i], 1), i);
        y = tsh_retain_grad(tsh_full_tensor(tsh_attention(in[0], in[1], in[2], &desc)));
        tsh_backward(ctx, tsh_sum(tsh_mul(tsh_cast(y, TSH_REAL), by), TSH_ALL, 0));
        for (int i = 0; i < 3; i++) got[i] = tsh_keep(tsh_clone(tsh_grad(x[i])));
        for (int i = 0; i < 3; i++) tsh_zero_grad(x[i]);
        for (int b = 0; b < ROWS; b++) {
            tsh_tensor *row[3], *rows = tsh_slice(by, 0, b, 1), *want;
            for (int i = 0; i < 3; i++)
                row[i] = tsh_slice(tsh_slice(x[i], 0, b, 1), 2, 0, i ? lengths[b] : LONG);
            /* of a causal row, padding is queries, too: those see all of its keys */
            int32_t *sees = (int32_t *)calloc((size_t)(LONG * lengths[b] + 1), sizeof *sees);
            for (int64_t e = 0; e < LONG * lengths[b]; e++)
                sees[e] = !causal || e % lengths[b] <= e / lengths[b];
            tsh_tensor *mask = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(LONG, lengths[b]),
                                               tsh_replicated(), sees);
            free(sees);
            want = tsh_retain_grad(
                tsh_attention(row[0], row[1], row[2], &(tsh_attention_desc){.mask = mask}));
            tsh_backward(ctx, tsh_sum(tsh_mul(tsh_cast(want, TSH_REAL), rows), TSH_ALL, 0));
            CHECK_OK();
            for (int i = 0; i < 3; i++) { /* the other rows' are 0 in x's own gradient */
                const double gap = apart(ctx, tsh_slice(got[i], 0, b, 1),
                                         tsh_slice(tsh_grad(x[i]), 0, b, 1));
                CHECK(gap <= sent + (r->layout == 1 && i ? 20 * near_by : 0),
                      "case %d, row %d: the gradient of input %d is off by %g", c, b, i, gap);
                tsh_zero_grad(x[i]);
            }
            CHECK(apart(ctx, tsh_cast(tsh_slice(y, 0, b, 1), TSH_REAL), tsh_cast(want, TSH_REAL)) <=
                      0, "case %d, row %d: other bits", c, b);
        }
        for (int i = 0; i < 3; i++) tsh_tensor_free(got[i]);
        tsh_step_end(ctx);
    }
    CHECK_OK();
    return 0;
}

static void padding_is_not_seen_and_has_no_gradient(void **state) {
    static const tsh_dtype dtypes[] = {TSH_REAL, TSH_BF16};
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++)
        for (int t = 0; t < COUNT(dtypes); t++)
            for (int layout = 0; layout < 3; layout++) {
                ragged r = {dtypes[t], layout};
                ranks_run(ranks_degrees[p], padded_rank, &r);
            }
}

/* Lengths and pasts that do not fit, which change no cache. */
static int ragged_refused_rank(tsh_ctx *ctx, void *user) {
    static const int64_t wrong[][4] = {{0, 0, 2, 3}, {0, 0, -1, 2}, {0, -1, 2, 2}, {0, 3, 2, 2},
                                       {INT64_MAX, 0, 2, 2}};
    tsh_tensor *x, *cache[2];
    tsh_attention_desc desc = {.pasts = wrong[0]};
    (void)user;
    tsh_no_grad_begin(ctx);
    x = tsh_ones(ctx, tsh_shape4(2, 1, 2, 3));
    CHECK(!tsh_attention(x, x, x, &desc), "no cache");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "pasts without a cache_k");
    desc.pasts = NULL;
    desc.lengths = wrong[0] + 2;
    CHECK(!tsh_attention(x, x, x, &desc), "too long");
    CHECK_SAYS(TSH_ERR_SHAPE, "row 1 has 0 cached and 3 new positions; of new ones there are 0 to "
                              "2, of all at most 2");
    for (int i = 0; i < 2; i++)
        cache[i] = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(2, 1, 4, 3), tsh_replicated());
    desc.cache_k = cache[0];
    desc.cache_v = cache[1];
    for (int c = 0; c < COUNT(wrong); c++) {
        desc.pasts = wrong[c];
        desc.lengths = wrong[c] + 2;
        CHECK(!tsh_attention(x, x, x, &desc), "case %d", c);
        CHECK_SAYS(TSH_ERR_SHAPE, "new positions; of new ones there are 0 to 2, of all at most 4");
    }
    for (int i = 0; i < 2; i++)
        CHECK(tsh_item(ctx, tsh_sum(tsh_mul(cache[i], cache[i]), TSH_ALL, 0)) <= 0, "written");
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void what_does_not_fit_a_ragged_batch_is_refused(void **state) {
    (void)state;
    ranks_run(1, ragged_refused_rank, NULL);
}

/* ------------------------------------------------------------------ options, on ranks */

typedef struct optional {
    tsh_tensor *x[3], *mask, *sinks, *by;
    tsh_tensor *y, *grad[5]; /* on whole tensors: the output, and the gradients of all five */
    tsh_attention_desc desc;
} optional;

/* Output and gradients of q, k, v laid out as said, and sinks and a mask by heads `sharded` as q or
 * whole; *o has what whole tensors gave, or takes it if o->y is NULL. */
static int optional_run(tsh_ctx *ctx, optional *o, const ragged *r, int sharded) {
    tsh_tensor *all[5] = {o->x[0], o->x[1], o->x[2], o->mask, o->sinks}, *in[3], *y;
    tsh_attention_desc desc = o->desc;
    const int first = o->y == NULL;
    for (int i = 0; i < 3; i++) in[i] = first ? o->x[i] : ragged_laid(r, o->x[i], i);
    desc.mask = o->mask;
    desc.sinks = o->sinks;
    if (sharded)
        desc.sinks = tsh_redistribute(o->sinks,
                                      r->layout == 0 ? tsh_shard_units(0, 2) : tsh_sharded(0));
    if (sharded && tsh_size(o->mask, 1) == H)
        desc.mask = tsh_redistribute(o->mask,
                                     r->layout == 0 ? tsh_shard_units(1, 2) : tsh_sharded(1));
    y = tsh_retain_grad(tsh_full_tensor(tsh_attention(in[0], in[1], in[2], &desc)));
    CHECK_OK();
    tsh_backward(ctx, tsh_sum(tsh_mul(y, o->by), TSH_ALL, 0));
    CHECK_OK();
    if (!first)
        CHECK(apart(ctx, y, o->y) < near_by, "layout %d: the output is off by %g", r->layout,
              apart(ctx, y, o->y));
    if (first) o->y = tsh_keep(tsh_clone(y));
    for (int i = 0; i < 5; i++) {
        tsh_tensor *grad = tsh_grad(all[i]);
        CHECK(grad, "input %d", i);
        if (first) o->grad[i] = tsh_keep(tsh_clone(grad));
        else /* sums of up to 300 terms of up to 4 */
            CHECK(apart(ctx, grad, o->grad[i]) < 40 * near_by,
                  "layout %d: the gradient of input %d is off by %g", r->layout, i,
                  apart(ctx, grad, o->grad[i]));
        tsh_zero_grad(all[i]);
    }
    tsh_step_end(ctx);
    return 0;
}

/* A window, a cap, a mask that broadcasts in every way, sinks: on ranks as on whole tensors. */
static int optional_rank(tsh_ctx *ctx, void *user) {
    static const int64_t masks[][4] = {{1, H, 150, 150}, {ROWS, 1, 150, 150}, {1, 1, 150, 150},
                                       {ROWS, H, 1, 150}, {1, H, 1, 1}, {ROWS, H, 150, 1}};
    (void)user;
    for (int c = 0; c < COUNT(masks); c++) {
        const int64_t *m = masks[c];
        optional o = {.desc = {.causal = c % 2, .window = c % 3 ? 30 : 0, .soft_cap = c ? 2 : 0}};
        for (int i = 0; i < 3; i++)
            o.x[i] = tsh_randn(ctx, tsh_shape4(ROWS, i ? H / 2 : H, 150, WIDTH));
        o.mask = tsh_randn(ctx, tsh_shape4(m[0], m[1], m[2], m[3]));
        o.sinks = tsh_randn(ctx, tsh_shape1(H));
        o.by = tsh_keep(tsh_randn(ctx, tsh_shape4(ROWS, H, 150, WIDTH)));
        for (int i = 0; i < 3; i++) o.x[i] = tsh_requires_grad(tsh_keep(o.x[i]), 1);
        o.mask = tsh_requires_grad(tsh_keep(o.mask), 1);
        o.sinks = tsh_requires_grad(tsh_keep(o.sinks), 1);
        for (int layout = -1; layout < 5; layout++) {
            const ragged r = {TSH_REAL, layout < 3 ? layout : layout - 3};
            if (optional_run(ctx, &o, &r, layout >= 3)) return 1;
        }
        for (int i = 0; i < 3; i++) tsh_tensor_free(o.x[i]);
        for (int i = 0; i < 5; i++) tsh_tensor_free(o.grad[i]);
        tsh_tensor_free(o.mask);
        tsh_tensor_free(o.sinks);
        tsh_tensor_free(o.by);
        tsh_tensor_free(o.y);
    }
    CHECK_OK();
    return 0;
}

static void options_are_the_same_at_every_degree(void **state) {
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++) ranks_run(ranks_degrees[p], optional_rank, NULL);
}

/* The bits of a mask's gradient do not depend on threads, however it broadcasts. */
static int threads_rank(tsh_ctx *ctx, void *user) {
    static const int64_t masks[][2] = {{1, H}, {ROWS, 1}, {1, 1}, {ROWS, H}};
    double **kept = (double **)user;
    for (int c = 0; c < COUNT(masks); c++) {
        tsh_tensor *x[3], *y, *mask = tsh_randn(ctx, tsh_shape4(masks[c][0], masks[c][1], 1, 200));
        double *got;
        for (int i = 0; i < 3; i++) x[i] = tsh_randn(ctx, tsh_shape4(ROWS, i ? 2 : H, 200, 32));
        mask = tsh_requires_grad(tsh_keep(mask), 1);
        y = tsh_attention(x[0], x[1], x[2], &(tsh_attention_desc){.mask = mask, .causal = 1});
        tsh_backward(ctx, tsh_sum(tsh_mul(y, y), TSH_ALL, 0));
        got = doubles(ctx, tsh_grad(mask));
        if (!kept[c]) kept[c] = doubles(ctx, tsh_grad(mask));
        CHECK(memcmp(got, kept[c], (size_t)tsh_numel(mask) * sizeof *got) == 0, "case %d", c);
        free(got);
        tsh_tensor_free(mask);
        tsh_step_end(ctx);
    }
    CHECK_OK();
    return 0;
}

static void the_gradient_of_a_mask_does_not_depend_on_threads(void **state) {
    double *kept[4] = {NULL, NULL, NULL, NULL};
    (void)state;
    for (int threads = 1; threads <= 3; threads++) {
        const tsh_desc desc = {.threads = threads, .seed = 3};
        ranks_run_with(1, &desc, threads_rank, kept);
    }
    for (int i = 0; i < 4; i++) free(kept[i]);
}

/* Tiles outside of the window are not computed: values there that are NaN are multiplied by
 * nothing. (In a tile that is computed, what the window hides is multiplied by 0.) A query may see
 * NaN of at most its window, the other queries of its tile, and the rest of two tiles of keys. */
static int window_rank(tsh_ctx *ctx, void *user) {
    enum { LONG = 2048, WINDOW = 64, NEAR = WINDOW + 96 + 2 * 256, POINTS = 8 };
    static tsh_real values[2][LONG], out[LONG], grad[LONG];
    (void)user;
    for (int way = 0; way < 2; way++) /* the query before the NaN, causal 0; after it */
        for (int point = 0; point < POINTS; point++) {
            const int64_t bad = point * (LONG / POINTS) + 100;
            tsh_tensor *x[3];
            int64_t touched = 0, reached = 0;
            for (int64_t i = 0; i < LONG; i++) values[0][i] = values[1][i] = 1;
            values[0][bad] = (tsh_real)NAN;
            for (int i = 0; i < 3; i++)
                x[i] = tsh_requires_grad(
                    tsh_tensor_from(ctx, TSH_REAL, tsh_shape4(1, 1, LONG, 1), tsh_replicated(),
                                    values[i < 2]), 1);
            tsh_tensor *y = tsh_retain_grad(tsh_attention(
                x[0], x[1], x[2], &(tsh_attention_desc){.causal = way, .window = WINDOW}));
            tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0));
            tsh_read(ctx, y, TSH_LOCAL, out, sizeof out);
            tsh_read(ctx, tsh_grad(x[0]), TSH_LOCAL, grad, sizeof grad);
            CHECK_OK();
            for (int64_t i = 0; i < LONG; i++) {
                const int64_t far = i > bad ? i - bad : bad - i;
                const int sees = far < WINDOW && !(way && i < bad);
                touched += isnan(out[i]) != 0;
                reached += isnan(grad[i]) != 0;
                CHECK(!sees || isnan(out[i]), "query %d sees key %d", (int)i, (int)bad);
                CHECK(far <= NEAR || (!isnan(out[i]) && !isnan(grad[i])),
                      "query %d has computed key %d", (int)i, (int)bad);
            }
            CHECK(touched <= 2 * NEAR && reached <= 2 * NEAR, "%d queries", (int)touched);
            for (int i = 0; i < 3; i++) tsh_tensor_free(x[i]);
            tsh_step_end(ctx);
        }
    /* a single query, of a cache */
    tsh_no_grad_begin(ctx);
    tsh_tensor *x = tsh_ones(ctx, tsh_shape4(1, 1, 1, 1)), *cache[2];
    for (int i = 0; i < 2; i++)
        cache[i] = tsh_tensor_from(ctx, TSH_REAL, tsh_shape4(1, 1, LONG, 1), tsh_replicated(),
                                   values[1]);
    for (int64_t i = 0; i < LONG - 1 - WINDOW - 256; i++)
        ((tsh_real *)tsh_data(ctx, cache[1]))[i] = (tsh_real)NAN;
    x = tsh_attention(x, x, x, &(tsh_attention_desc){.causal = 1, .window = WINDOW,
                                                     .cache_k = cache[0], .cache_v = cache[1],
                                                     .past = LONG - 1});
    CHECK(fabs(tsh_item(ctx, x) - 1) < near_by, "decoding");
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void tiles_outside_of_a_window_are_skipped(void **state) {
    (void)state;
    ranks_run(1, window_rank, NULL);
}

/* A window, a cap and sinks through a cache, a token at a time and in chunks, and in rows of
 * unequal length: as all at once. */
static int window_cache_rank(tsh_ctx *ctx, void *user) {
    enum { LONG = 330 };
    static const int64_t windows[] = {1, 40, 256, 300, LONG, 1000};
    const tsh_layout heads = tsh_sharded(1);
    (void)user;
    tsh_no_grad_begin(ctx);
    for (int c = 0; c < COUNT(windows); c++) {
        tsh_attention_desc desc = {.causal = 1, .window = windows[c], .soft_cap = 3};
        tsh_tensor *x[3], *want, *cache[2];
        int64_t pasts[2] = {0, 0};
        desc.sinks = tsh_randn(ctx, tsh_shape1(H));
        for (int i = 0; i < 3; i++)
            x[i] = tsh_redistribute(tsh_randn(ctx, tsh_shape4(2, H, LONG, D)), heads);
        want = tsh_attention(x[0], x[1], x[2], &desc);
        for (int i = 0; i < 2; i++)
            cache[i] = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(2, H, LONG, D), heads);
        desc.cache_k = cache[0];
        desc.cache_v = cache[1];
        desc.pasts = pasts;
        for (int64_t at = 0, n; at < LONG; at += n) {
            int64_t lengths[2];
            tsh_tensor *in[3], *y;
            n = at == 0 ? 100 : at == 100 ? 200 : 1;
            lengths[0] = n;
            lengths[1] = at == 100 ? 150 : n; /* row 1 stays behind from here on */
            desc.lengths = lengths;
            if (at > 100 && pasts[1] + n > LONG) break;
            for (int i = 0; i < 3; i++) {
                tsh_tensor *row[2];
                for (int b = 0; b < 2; b++)
                    row[b] = tsh_slice(tsh_slice(x[i], 0, b, 1), 2, pasts[b], n);
                in[i] = tsh_concat(row, 2, 0);
            }
            y = tsh_attention(in[0], in[1], in[2], &desc);
            CHECK(y, "at %d", (int)at);
            for (int b = 0; b < 2; b++) {
                const double gap = apart(
                    ctx, tsh_slice(tsh_slice(y, 0, b, 1), 2, 0, lengths[b]),
                    tsh_slice(tsh_slice(want, 0, b, 1), 2, pasts[b], lengths[b]));
                CHECK(gap <= 0, "window %d, position %d, row %d: off by %g", (int)windows[c],
                      (int)pasts[b], b, gap);
                pasts[b] += lengths[b];
            }
        }
        for (int i = 0; i < 2; i++) tsh_tensor_free(cache[i]);
        tsh_step_end(ctx);
    }
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void a_window_through_a_cache(void **state) {
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++)
        ranks_run(ranks_degrees[p], window_cache_rank, NULL);
}

/* Options that say nothing possible. */
static int options_refused_rank(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = tsh_ones(ctx, tsh_shape4(1, 4, 2, 3)), *grad;
    tsh_tensor *cache = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(1, 4, 2, 3), tsh_replicated());
    (void)user;
    CHECK_TRUE(!tsh_attention(x, x, x, &(tsh_attention_desc){.window = -1}));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "window is -1");
    CHECK_TRUE(!tsh_attention(x, x, x, &(tsh_attention_desc){.soft_cap = -2}));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "soft_cap -2");
    CHECK_TRUE(!tsh_attention(x, x, x, &(tsh_attention_desc){.soft_cap = (double)NAN}));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "none may be below 0");
    for (int c = 0; c < 3; c++) {
        tsh_tensor *sinks = tsh_ones(ctx, c ? tsh_shape2(2, 2) : tsh_shape1(3));
        if (c == 2) sinks = tsh_cast(tsh_ones(ctx, tsh_shape1(4)), TSH_I32);
        CHECK(!tsh_attention(x, x, x, &(tsh_attention_desc){.sinks = sinks}), "case %d", c);
        CHECK_SAYS(TSH_ERR_SHAPE, "takes floating ones of shape (4)");
    }
    CHECK_TRUE(!tsh_attention(x, x, x, &(tsh_attention_desc){
                                      .sinks = tsh_redistribute(tsh_ones(ctx, tsh_shape1(4)),
                                                                tsh_sharded(0))}));
    CHECK_SAYS(TSH_ERR_SHAPE, "sharded as the heads of q");
    for (int c = 0; c < 4; c++) { /* heads of a whole q, keys, rows, one head for all */
        const int64_t heads = c < 3 ? 4 : 1, dim = c == 1 ? 3 : c == 2 ? 0 : 1;
        tsh_tensor *q = c ? tsh_redistribute(x, tsh_sharded(1)) : x;
        tsh_tensor *mask = tsh_redistribute(tsh_ones(ctx, tsh_shape4(1, heads, 2, 2)),
                                            tsh_sharded((int)dim));
        CHECK(!tsh_attention(q, q, q, &(tsh_attention_desc){.mask = mask}), "case %d", c);
        CHECK_SAYS(TSH_ERR_SHAPE, "replicated or sharded as the heads of q");
    }
    grad = tsh_requires_grad(tsh_keep(tsh_ones(ctx, tsh_shape2(2, 2))), 1);
    CHECK_TRUE(!tsh_attention(x, x, x, &(tsh_attention_desc){.mask = grad, .cache_k = cache,
                                                        .cache_v = cache}));
    CHECK_SAYS(TSH_ERR_STATE, "without gradients");
    CHECK_OK();
    return 0;
}

static void impossible_options_are_refused(void **state) {
    (void)state;
    ranks_run(2, options_refused_rank, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_are_the_same_at_every_degree),
        cmocka_unit_test(the_gradient_of_a_mask_does_not_depend_on_threads),
        cmocka_unit_test(tiles_outside_of_a_window_are_skipped),
        cmocka_unit_test(a_window_through_a_cache),
        cmocka_unit_test(impossible_options_are_refused),
        cmocka_unit_test(a_row_of_a_ragged_batch_has_the_bits_of_it_alone),
        cmocka_unit_test(padding_is_not_seen_and_has_no_gradient),
        cmocka_unit_test(what_does_not_fit_a_ragged_batch_is_refused),
        cmocka_unit_test(borders_of_tiles_in_every_dtype),
        cmocka_unit_test(a_cache_of_16_bits),
        cmocka_unit_test(a_head_alone_has_the_same_bits),
        cmocka_unit_test(masks_equal_the_plain_formula),
        cmocka_unit_test(causal_equals_its_mask),
        cmocka_unit_test(a_query_that_sees_nothing_gives_zero),
        cmocka_unit_test(a_cache_equals_all_at_once),
        cmocka_unit_test(grouped_queries_through_a_cache),
        cmocka_unit_test(gradients_of_fewer_heads_than_ranks),
        cmocka_unit_test(gradients_at_scores_of_ten_thousand),
        cmocka_unit_test(a_score_that_is_not_finite_is_seen),
        cmocka_unit_test(what_is_refused_changes_no_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
