/* tsh_sample and tsh_argmax of logits whose vocabulary is sharded: the same ids at every degree,
 * the sets that the filters keep and the distribution of 10^5 draws against a plain reference,
 * ties, penalties, seeds, and mistakes. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

/* ------------------------------------------------------------------- reference */

enum { VOCAB = 23, DRAWS = 10000 };

/* Logits of a row, with ties: 23 classes, the largest twice. */
static double logit(int c) {
    static const int half[VOCAB] = {3, -2, 5, 5, 0,  1, -4, 2, 2,  -1, 4, 4,
                                    4, -3, 0, 1, -6, 3, 1, -2, -2, 2,  -5};
    return half[c] / 2.0;
}

static int descending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Leaves what is at least the smallest value that the sorted probabilities need to reach p. */
static double smallest_kept(const double *p, double sum) {
    double sorted[VOCAB], total = 0;
    int i;
    memcpy(sorted, p, sizeof sorted);
    qsort(sorted, VOCAB, sizeof *sorted, descending);
    for (i = 0; i < VOCAB - 1; i++)
        if ((total += sorted[i]) >= sum) break;
    return sorted[i];
}

static void normalise(double *p, double least) {
    double total = 0;
    for (int c = 0; c < VOCAB; c++) total += p[c] >= least ? p[c] : 0;
    for (int c = 0; c < VOCAB; c++) p[c] = p[c] >= least ? p[c] / total : 0;
}

/* What transformers' processors and softmax make of the logits: penalty, temperature, top-k, top-p,
 * min-p, each on the probabilities that the one before left. */
static void reference(const tsh_sample_desc *desc, const int64_t *previous, int n, double *p) {
    double sorted[VOCAB], top = 0;
    int penalised[VOCAB] = {0};
    for (int i = 0; i < n; i++)
        if (previous[i] >= 0 && previous[i] < VOCAB) penalised[previous[i]] = 1;
    for (int c = 0; c < VOCAB; c++) {
        double x = logit(c);
        if (penalised[c]) x = x < 0 ? x * desc->penalty : x / desc->penalty;
        p[c] = x / (desc->temperature > 0 ? desc->temperature : 1);
    }
    memcpy(sorted, p, sizeof sorted);
    qsort(sorted, VOCAB, sizeof *sorted, descending);
    for (int c = 0; c < VOCAB; c++)
        p[c] = desc->top_k > 0 && desc->top_k < VOCAB && p[c] < sorted[desc->top_k - 1] ? 0
                                                                                        : exp(p[c]);
    normalise(p, 0);
    if (desc->top_p > 0) normalise(p, smallest_kept(p, desc->top_p));
    for (int c = 0; c < VOCAB; c++) top = fmax(top, p[c]);
    normalise(p, desc->min_p * top);
}

/* --------------------------------------------------------------- distribution */

typedef struct draws {
    tsh_sample_desc desc;
    int rows, columns; /* columns: of previous, 0: none */
    int64_t previous[4];
    int64_t *ids; /* of one rank, which all others must have */
} draws;

/* (rows, 1, VOCAB), each row the same. */
static tsh_tensor *same_logits(tsh_ctx *ctx, int rows, tsh_dtype dtype) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(rows, 1, VOCAB), tsh_replicated());
    tsh_real *values = t ? (tsh_real *)tsh_data(ctx, t) : NULL;
    for (int i = 0; values && i < rows * VOCAB; i++) values[i] = (tsh_real)logit(i % VOCAB);
    return tsh_cast(t, dtype); /* all are exact in bf16 */
}

static tsh_tensor *same_previous(tsh_ctx *ctx, const draws *d) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_I64, tsh_shape3(d->rows, 1, d->columns),
                                   tsh_replicated());
    int64_t *values = t ? (int64_t *)tsh_data(ctx, t) : NULL;
    for (int i = 0; values && i < d->rows * d->columns; i++)
        values[i] = d->previous[i % d->columns];
    return t;
}

static int draw_rank(tsh_ctx *ctx, void *user) {
    draws *d = (draws *)user;
    tsh_sample_desc desc = d->desc;
    tsh_tensor *logits, *ids;
    int64_t *got;
    tsh_no_grad_begin(ctx);
    if (d->columns) desc.previous = same_previous(ctx, d);
    /* sharded; on two ranks sharded in bf16, and whole, too */
    for (int way = 0; way < (tsh_world(ctx)->size == 2 ? 3 : 1); way++) {
        logits = same_logits(ctx, d->rows, way == 1 ? TSH_BF16 : TSH_REAL);
        if (way < 2) logits = tsh_redistribute(logits, tsh_sharded(-1));
        ids = tsh_sample(logits, &desc);
        CHECK_TRUE(ids && tsh_ndim(ids) == 2 && tsh_size(ids, 0) == d->rows &&
                   tsh_size(ids, 1) == 1);
        CHECK_TRUE(tsh_dtype_of(ids) == TSH_I64 && tsh_layout_of(ids).kind == TSH_REPLICATED);
        got = (int64_t *)tsh_data(ctx, ids);
        if (tsh_world(ctx)->size == 1 && way == 0)
            memcpy(d->ids, got, (size_t)d->rows * sizeof *got);
        else
            for (int i = 0; i < d->rows; i++)
                CHECK(got[i] == d->ids[i], "way %d: row %d has %d, not %d", way, i, (int)got[i],
                      (int)d->ids[i]);
    }
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

/* Chi-square of the ids drawn against the reference; no id that a filter leaves out. */
static void expect_distribution(const draws *d, int n) {
    double p[VOCAB], chi = 0;
    int count[VOCAB] = {0}, kept = 0;
    reference(&d->desc, d->previous, d->columns, p);
    for (int i = 0; i < n; i++) {
        assert_in_range(d->ids[i], 0, VOCAB - 1);
        count[d->ids[i]]++;
    }
    for (int c = 0; c < VOCAB; c++) {
        const double expected = p[c] * n;
        if (!(p[c] > 0)) assert_int_equal(count[c], 0);
        if (!(p[c] > 0)) continue;
        assert_true(expected > 5); /* or the test would say little */
        chi += (count[c] - expected) * (count[c] - expected) / expected;
        kept++;
    }
    /* kept - 1 degrees of freedom: more than 5 standard deviations would be one in a million */
    if (chi > kept - 1 + 5 * sqrt(2.0 * kept)) fail_msg("chi-square %g of %d ids", chi, kept);
}

static void prove(draws *d, int kept) {
    double p[VOCAB];
    int positive = 0;
    d->ids = (int64_t *)calloc((size_t)d->rows, sizeof *d->ids);
    for (int i = 0; i < COUNT(ranks_degrees); i++) {
        if (i == 0) ranks_run(1, draw_rank, d);
        if (ranks_degrees[i] > 1) ranks_run(ranks_degrees[i], draw_rank, d);
    }
    expect_distribution(d, d->rows);
    reference(&d->desc, d->previous, d->columns, p);
    for (int c = 0; c < VOCAB; c++) positive += p[c] > 0;
    assert_int_equal(positive, kept);
    free(d->ids);
}

static void a_hundred_thousand_draws_are_softmax(void **state) {
    draws d = {.rows = 100000, .desc = {.seed = 5}};
    (void)state;
    prove(&d, VOCAB);
}

static void filters_keep_what_the_reference_keeps(void **state) {
    (void)state;
    draws hot = {.rows = DRAWS, .desc = {.temperature = 1.7, .seed = 1}};
    prove(&hot, VOCAB);
    draws one = {.rows = DRAWS, .desc = {.top_k = 1, .seed = 2}};
    prove(&one, 2); /* a tie at the last place stays */
    draws five = {.rows = DRAWS, .desc = {.top_k = 5, .temperature = 0.7, .seed = 3}};
    prove(&five, 5);
    draws four = {.rows = DRAWS, .desc = {.top_k = 4, .seed = 4}};
    prove(&four, 5);
    draws many = {.rows = DRAWS, .desc = {.top_k = 1000, .seed = 4}};
    prove(&many, VOCAB);
    draws half = {.rows = DRAWS, .desc = {.top_p = 0.5, .seed = 5}};
    prove(&half, 5);
    draws little = {.rows = DRAWS, .desc = {.top_p = 1e-6, .seed = 6}};
    prove(&little, 2);
    draws most = {.rows = DRAWS, .desc = {.top_p = 0.9, .seed = 7}};
    prove(&most, 13);
    draws share = {.rows = DRAWS, .desc = {.min_p = 0.3, .seed = 8}};
    prove(&share, 7);
    draws top = {.rows = DRAWS, .desc = {.min_p = 1, .seed = 8}};
    prove(&top, 2);
}

/* top_p is of what top_k left and min_p of what is largest after both; a penalty changes which. */
static void filters_apply_in_the_order_of_transformers(void **state) {
    draws d = {.rows = 25000, .columns = 4, .previous = {2, -1, 2, 10}, .desc = {.seed = 9}};
    (void)state;
    d.desc.penalty = 1.8;
    d.desc.temperature = 0.8;
    prove(&d, VOCAB);
    d.desc.top_k = 6;
    prove(&d, 6);
    d.desc.top_p = 0.9;
    prove(&d, 5);
    d.desc.min_p = 0.5;
    prove(&d, 3);
    d.previous[1] = VOCAB; /* outside, too */
    prove(&d, 3);
}

/* ------------------------------------------------------------------------ seeds */

static int seeds_rank(tsh_ctx *ctx, void *user) {
    draws *d = (draws *)user; /* a draw for each position */
    int64_t together[4], other = 0;
    tsh_sample_desc desc = {.seed = 40};
    tsh_no_grad_begin(ctx);
    for (int t = 0; t < d->rows; t++) {
        tsh_scope_begin(ctx);
        desc.position = t;
        tsh_tensor *four = same_logits(ctx, 4, TSH_REAL), *one = same_logits(ctx, 1, TSH_REAL);
        tsh_read(ctx, tsh_sample(four, &desc), TSH_LOCAL, together, sizeof together);
        d->ids[t] = together[0];
        for (int r = 0; r < 4 && t < 50; r++) {
            int64_t alone = -1;
            tsh_sample_desc mine = {.seed = 40 + (uint64_t)r, .position = t};
            tsh_read(ctx, tsh_sample(one, &mine), TSH_LOCAL, &alone, sizeof alone);
            CHECK(alone == together[r], "position %d: row %d is not what it is alone", t, r);
        }
        other += together[0] != together[1];
        tsh_tensor_free(four);
        tsh_tensor_free(one);
        tsh_scope_end(ctx);
    }
    tsh_no_grad_end(ctx);
    CHECK_OK();
    CHECK(other > d->rows / 2, "rows have different numbers");
    return 0;
}

static void a_row_is_drawn_by_its_seed_and_position(void **state) {
    draws d = {.rows = 10000};
    (void)state;
    d.ids = (int64_t *)calloc((size_t)d.rows, sizeof *d.ids);
    ranks_run(1, seeds_rank, &d);
    expect_distribution(&d, d.rows);
    free(d.ids);
}

/* ------------------------------------------------------------------------ greedy */

/* Temperature 0 takes the largest logit after the penalty, the smaller id of equals. */
static int greedy_rank(tsh_ctx *ctx, void *user) {
    static const int32_t seen[5][2] = {{-1, -1}, {2, -1}, {2, 3}, {16, 16}, {3, 99}};
    static const int64_t want[5] = {2, 3, 10, 2, 2};
    tsh_sample_desc desc = {.temperature = TSH_ZERO, .penalty = 1.5};
    int64_t ids[5];
    (void)user;
    tsh_tensor *x = tsh_redistribute(same_logits(ctx, 5, TSH_REAL), tsh_sharded(-1));
    desc.previous = tsh_tensor_from(ctx, TSH_I32, tsh_shape3(5, 1, 2), tsh_replicated(), seen);
    tsh_read(ctx, tsh_sample(x, &desc), TSH_LOCAL, ids, sizeof ids);
    CHECK_OK();
    for (int i = 0; i < 5; i++)
        CHECK(ids[i] == want[i], "row %d is %d, not %d", i, (int)ids[i], (int)want[i]);
    desc.previous = NULL;
    desc.temperature = 1e-6; /* no overflow */
    tsh_read(ctx, tsh_sample(x, &desc), TSH_LOCAL, ids, sizeof ids);
    for (int i = 0; i < 5; i++) CHECK(ids[i] == 2 || ids[i] == 3, "row %d is %d", i, (int)ids[i]);
    CHECK_OK();
    return 0;
}

static void temperature_zero_takes_the_largest(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++) ranks_run(ranks_degrees[d], greedy_rank, NULL);
}

/* ------------------------------------------------------------------------ argmax */

/* Every layout of a row gives the whole one's first largest place, by one all-gather. */
static int argmax_rank(tsh_ctx *ctx, void *user) {
    enum { ROWS = 6 };
    static const int64_t lengths[] = {1, 2, 5, 12, 37};
    const int size = tsh_tp(ctx)->size;
    (void)user;
    tsh_no_grad_begin(ctx);
    for (int c = 0; c < 4 * COUNT(lengths); c++) {
        const int64_t n = lengths[c / 4];
        const int halves = c % 4 == 1, first = c % 4 == 2; /* segments; along dimension 0 */
        const tsh_dtype dtype = c % 4 == 3 ? TSH_BF16 : TSH_REAL;
        tsh_shape shape = first ? tsh_shape2(2 * n, ROWS) : tsh_shape2(ROWS, 2 * n);
        tsh_layout cut = tsh_shard_segments(first ? 0 : -1, halves ? 2 : 1, 1);
        tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, shape, tsh_replicated()), *got;
        tsh_real *values = (tsh_real *)tsh_data(ctx, x);
        uint64_t before;
        int64_t want[ROWS], ids[ROWS];
        for (int r = 0; r < ROWS; r++) {
            want[r] = 0;
            for (int64_t i = 0; i < 2 * n; i++) {
                /* few values, so many ties; row 0 is constant, row 1 has NaNs at the end */
                const uint64_t mixed = ranks_mix((uint64_t)c, (uint64_t)(r * 100 + i));
                double v = r == 0 ? -3 : (double)(mixed % 4);
                if (r == 1 && i >= 2 * n - 2) v = (double)NAN;
                if (r == 2) v = -(double)INFINITY;
                values[first ? i * ROWS + r : r * 2 * n + i] = (tsh_real)v;
            }
            for (int64_t i = 2 * n - 1; i >= 0; i--) {
                const int64_t step = first ? ROWS : 1, row = first ? r : r * 2 * n;
                const double v = (double)values[row + i * step];
                const double best = (double)values[row + want[r] * step];
                if (isnan(v) || (!isnan(best) && v >= best)) want[r] = i;
            }
        }
        x = tsh_redistribute(tsh_cast(x, dtype), cut);
        before = tsh_tp(ctx)->stats.calls[TSH_ALLGATHER];
        got = tsh_argmax(x, first ? 0 : -1, 0);
        CHECK(got && tsh_layout_of(got).kind == TSH_REPLICATED && tsh_ndim(got) == 1, "case %d", c);
        CHECK(tsh_tp(ctx)->stats.calls[TSH_ALLGATHER] - before == (size > 1), "one all-gather");
        tsh_read(ctx, got, TSH_LOCAL, ids, sizeof ids);
        for (int r = 0; r < ROWS; r++)
            CHECK(ids[r] == want[r], "case %d, row %d: %d, not %d", c, r, (int)ids[r],
                  (int)want[r]);
    }
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void argmax_of_shards_is_that_of_the_whole(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++) ranks_run(ranks_degrees[d], argmax_rank, NULL);
}

/* ---------------------------------------------------------------------- mistakes */

static int refused_rank(tsh_ctx *ctx, void *user) {
    static const tsh_sample_desc wrong[] = {
        {.temperature = -1}, {.temperature = (double)NAN}, {.temperature = HUGE_VAL},
        {.top_k = -1},       {.top_p = 1.5},               {.top_p = -0.1},
        {.min_p = 2},        {.top_p = (double)NAN},       {.min_p = -1},
        {.penalty = -1},     {.penalty = HUGE_VAL}};
    tsh_sample_desc desc = {.penalty = 2};
    tsh_tensor *x = tsh_keep(tsh_redistribute(same_logits(ctx, 2, TSH_REAL), tsh_sharded(-1)));
    (void)user;
    for (int i = 0; i < COUNT(wrong); i++) {
        CHECK(!tsh_sample(x, &wrong[i]), "number %d", i);
        CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_sample: temperature ");
    }
    desc.previous = tsh_zeros(ctx, tsh_shape3(2, 1, 3));
    CHECK(!tsh_sample(x, &desc), "values are no ids");
    CHECK_SAYS(TSH_ERR_SHAPE, "takes integers (.., n)");
    desc.previous = tsh_tensor_new(ctx, TSH_I32, tsh_shape3(1, 1, 3), tsh_replicated());
    CHECK(!tsh_sample(x, &desc), "a row for two");
    CHECK_SAYS(TSH_ERR_SHAPE, "previous i32 (1, 1, 3)");
    CHECK(!tsh_sample(tsh_zeros(ctx, tsh_shape2(2, 0)), NULL), "nothing to choose from");
    CHECK_SAYS(TSH_ERR_SHAPE, "V at least 1");
    CHECK(!tsh_sample(tsh_zeros(ctx, tsh_shape0()), NULL), "a scalar");
    CHECK_SAYS(TSH_ERR_SHAPE, "(.., V)");
    CHECK(tsh_sample(x, NULL), "no description: no filter");
    CHECK_OK();
    return 0;
}

static void mistakes_are_told_and_change_nothing(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++) ranks_run(ranks_degrees[d], refused_rank, NULL);
}

/* Logits from which nothing can be chosen are the same error whether an id is drawn or the largest
 * is taken, in every layout, on every rank; infinities that are not the largest are none. */
static int not_finite_rank(tsh_ctx *ctx, void *user) {
    const tsh_real nan = (tsh_real)NAN, inf = (tsh_real)INFINITY;
    const tsh_real row[5][4] = {{1, 2, nan, 0}, {nan, inf, 1, 2}, {0, 1, 2, inf},
                                {-inf, -inf, -inf, -inf}, {-inf, 3, -inf, 1}};
    const tsh_layout layout[4] = {tsh_replicated(), tsh_sharded(1), tsh_sharded(0), tsh_partial()};
    (void)user;
    for (int i = 0; i < 5 * 4 * 4; i++) {
        const tsh_sample_desc ways[4] = {{.temperature = TSH_ZERO},
                                         {.temperature = TSH_ZERO, .top_p = 0.5},
                                         {.temperature = 1},
                                         {.top_k = 1}};
        tsh_tensor *t = tsh_full(ctx, tsh_shape2(3, 4), 0), *ids;
        tsh_real *values = (tsh_real *)tsh_data(ctx, t);
        for (int c = 0; c < 4; c++) values[4 + c] = row[i / 16][c];
        ids = tsh_sample(tsh_redistribute(t, layout[i / 4 % 4]), &ways[i % 4]);
        if (i / 16 == 4) {
            int64_t got[3] = {-1, -1, -1};
            tsh_read(ctx, ids, TSH_GLOBAL, got, sizeof got);
            CHECK_OK();
            const int may_be_3 = i % 4 == 2;
            CHECK(got[1] == 1 || (may_be_3 && got[1] == 3), "number %d: %d", i, (int)got[1]);
        } else {
            CHECK(!ids, "number %d is not refused", i);
            CHECK_SAYS(TSH_ERR_ANOMALY, "row 1 of the logits has a NaN, or its largest");
        }
    }
    return 0;
}

static void logits_that_are_not_finite_are_refused_greedily_too(void **state) {
    (void)state;
    for (int d = 0; d < COUNT(ranks_degrees); d++)
        ranks_run(ranks_degrees[d], not_finite_rank, NULL);
}

/* Rows of a real vocabulary's size, against sorting: how many ids each filter keeps. */
static int wide_rank(tsh_ctx *ctx, void *user) {
    enum { WIDE = 50000, TIMES = 300 };
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(1, WIDE), tsh_replicated());
    tsh_real *values = (tsh_real *)tsh_data(ctx, x), *sorted;
    double sum = 0, part = 0;
    int64_t id = -1, last = 0;
    (void)user;
    CHECK_TRUE(values);
    for (int i = 0; i < WIDE; i++)
        values[i] = (tsh_real)(log((double)(1 + ranks_mix(7, (uint64_t)i) % 100000)) * 2);
    tsh_real least[2] = {0, 0}; /* of top_k 40 and top_p 0.3, by counting down from the top */
    sorted = (tsh_real *)malloc(WIDE * sizeof *sorted);
    memcpy(sorted, values, WIDE * sizeof *sorted);
    for (int i = 1; i < WIDE; i += 1) { /* heap of the largest */
        int at = i;
        const tsh_real v = sorted[i];
        for (; at > 0 && sorted[(at - 1) / 2] < v; at = (at - 1) / 2)
            sorted[at] = sorted[(at - 1) / 2];
        sorted[at] = v;
    }
    for (int i = 0; i < WIDE; i++) sum += exp((double)values[i]);
    for (last = 0; last < WIDE && part < 0.3 * sum; last++) {
        int at = 0, end = WIDE - 1 - (int)last;
        const tsh_real top = sorted[0], v = sorted[end];
        if (last < 40) least[0] = top;
        part += exp((double)top);
        least[1] = top;
        for (int child = 1; child < end; child = 2 * at + 1) {
            if (child + 1 < end && sorted[child + 1] > sorted[child]) child++;
            if (sorted[child] <= v) break;
            sorted[at] = sorted[child];
            at = child;
        }
        sorted[at] = v;
    }
    free(sorted);
    CHECK(last > 1000, "a set that is not small: %d", (int)last);
    for (int way = 0; way < 2; way++) {
        double smallest = HUGE_VAL;
        for (int t = 0; t < TIMES; t++) {
            tsh_sample_desc desc = {.position = t, .seed = 3};
            if (way == 0) desc.top_k = 40;
            if (way == 1) desc.top_p = 0.3;
            tsh_scope_begin(ctx);
            tsh_read(ctx, tsh_sample(x, &desc), TSH_LOCAL, &id, sizeof id);
            tsh_scope_end(ctx);
            CHECK_OK();
            CHECK(values[id] >= least[way], "way %d drew %g, below %g", way, (double)values[id],
                  (double)least[way]);
            smallest = fmin(smallest, (double)values[id]);
        }
        CHECK(smallest - (double)least[way] < 0.02, "way %d never drew what is smallest", way);
    }
    return 0;
}

static void filters_of_a_large_vocabulary(void **state) {
    (void)state;
    ranks_run(1, wide_rank, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_hundred_thousand_draws_are_softmax),
        cmocka_unit_test(filters_keep_what_the_reference_keeps),
        cmocka_unit_test(filters_apply_in_the_order_of_transformers),
        cmocka_unit_test(a_row_is_drawn_by_its_seed_and_position),
        cmocka_unit_test(temperature_zero_takes_the_largest),
        cmocka_unit_test(argmax_of_shards_is_that_of_the_whole),
        cmocka_unit_test(mistakes_are_told_and_change_nothing),
        cmocka_unit_test(logits_that_are_not_finite_are_refused_greedily_too),
        cmocka_unit_test(filters_of_a_large_vocabulary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
