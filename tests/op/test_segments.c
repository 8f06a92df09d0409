/* tsh_attention with segments: each sequence of a packed row gets what it gets alone, padding gets
 * nothing, whatever lies between; the same at every degree, in every dtype, with all options. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

enum { B = 3, H = 4, T = 300, D = 24, RUNS = 6, OPTIONS = 5 };

static const double near_by = sizeof(tsh_real) == 4 ? 2e-6 : 1e-13; /* values are below 3 */

/* A run of positions of one segment. */
typedef struct run {
    int32_t id;
    int n;
} run;

/* The runs of each row; they add up to T. */
typedef struct packing {
    run row[B][RUNS];
} packing;

/* Segments whose positions follow each other: short and long ones, in and out of order. */
static const packing neighbours = {{{{0, 70}, {1, 1}, {2, 197}, {-1, 32}},
                                    {{3, 130}, {0, 41}, {7, 129}},
                                    {{-1, 10}, {4, 280}, {-5, 10}}}};
/* The second row has no padding, the third nothing else. */
static const packing scattered = {{{{0, 60}, {1, 50}, {0, 30}, {2, 100}, {-1, 10}, {2, 50}},
                                   {{5, 100}, {3, 80}, {5, 10}, {3, 10}, {1, 100}},
                                   {{-1, 300}}}};

typedef struct job {
    const packing *packed;
    tsh_dtype dtype;
    int layout; /* 0: q, k, v by heads; 1: k and v whole; 2: by batch */
    int option; /* see options_of */
    double *kept[5];
} job;

static int32_t segment_at(const packing *p, int b, int i) {
    int r = 0;
    while (i >= p->row[b][r].n) i -= p->row[b][r++].n;
    return p->row[b][r].id;
}

/* The segments as a tensor (B, T), replicated. */
static tsh_tensor *segments_of(tsh_ctx *ctx, const packing *p) {
    static int32_t ids[RANKS_MAX][B * T];
    int32_t *own = ids[tsh_world(ctx)->rank];
    for (int e = 0; e < B * T; e++) own[e] = segment_at(p, e / T, e % T);
    return tsh_from(ctx, own, tsh_shape2(B, T), TSH_I32);
}

/* The same as a mask (B, 1, T, T) of tsh_attention. */
static tsh_tensor *mask_of(tsh_ctx *ctx, const packing *p) {
    int32_t *sees = (int32_t *)malloc((size_t)B * T * T * sizeof *sees);
    tsh_tensor *mask;
    for (int b = 0, e = 0; b < B; b++)
        for (int i = 0; i < T; i++)
            for (int j = 0; j < T; j++, e++)
                sees[e] = segment_at(p, b, i) >= 0 && segment_at(p, b, i) == segment_at(p, b, j);
    mask = tsh_from(ctx, sees, tsh_shape4(B, 1, T, T), TSH_I32);
    free(sees);
    return mask;
}

static tsh_tensor *laid(const job *j, tsh_tensor *x, int i) {
    if (j->layout == 2) return tsh_redistribute(x, tsh_sharded(0));
    if (i && j->layout == 1) return x;
    return tsh_redistribute(x, i || j->layout == 1 ? tsh_sharded(1) : tsh_shard_units(1, 2));
}

static tsh_attention_desc options_of(const job *j) {
    tsh_attention_desc desc = {.causal = j->option != 0};
    if (j->option == 2) desc.window = 40;
    if (j->option == 3) desc.soft_cap = 2;
    return desc;
}

/* The largest distance of two tensors, over all ranks' pieces. */
static double apart(tsh_ctx *ctx, tsh_tensor *a, tsh_tensor *b) {
    tsh_tensor *gap = tsh_sub(tsh_cast(tsh_full_tensor(a), TSH_REAL),
                              tsh_cast(tsh_full_tensor(b), TSH_REAL));
    return tsh_item(ctx, tsh_max(tsh_sqrt(tsh_mul(gap, gap)), TSH_ALL, 0));
}

/* What is compared: q, k, v (leaves); a mask and sinks, if there are any; weights of the loss. */
typedef struct inputs {
    tsh_tensor *all[5], *by;
    int count;
} inputs;

static inputs inputs_of(tsh_ctx *ctx, const job *j) {
    inputs x = {{NULL}, NULL, 3};
    for (int i = 0; i < 3; i++)
        x.all[i] = tsh_cast(tsh_randn(ctx, tsh_shape4(B, i ? H / 2 : H, T, D)), j->dtype);
    if (j->option == 3) x.all[x.count++] = tsh_randn(ctx, tsh_shape4(1, H, T, T));
    if (j->option == 4) x.all[x.count++] = tsh_randn(ctx, tsh_shape4(B, 1, 1, T));
    if (x.count == 4) x.all[x.count++] = tsh_randn(ctx, tsh_shape1(H));
    for (int i = 0; i < x.count; i++) x.all[i] = tsh_requires_grad(tsh_keep(x.all[i]), 1);
    x.by = tsh_keep(tsh_randn(ctx, tsh_shape4(B, H, T, D)));
    return x;
}

static void inputs_free(inputs *x) {
    for (int i = 0; i < x->count; i++) tsh_tensor_free(x->all[i]);
    tsh_tensor_free(x->by);
}

/* The packed rows on j's layout: the output, whole. */
static tsh_tensor *packed_of(tsh_ctx *ctx, const job *j, const inputs *x) {
    tsh_attention_desc desc = options_of(j);
    tsh_tensor *in[3];
    for (int i = 0; i < 3; i++) in[i] = laid(j, tsh_scale(x->all[i], 1), i);
    desc.mask = x->all[3];
    desc.sinks = x->all[4];
    desc.segments = segments_of(ctx, j->packed);
    if (j->layout == 2 && j->option % 2)
        desc.segments = tsh_redistribute(desc.segments, tsh_sharded(0));
    return tsh_full_tensor(tsh_attention(in[0], in[1], in[2], &desc));
}

/* x from element `first` of dimension d on, n of them; all if it has only one. */
static tsh_tensor *part_of(tsh_tensor *x, int d, int64_t first, int64_t n) {
    return tsh_size(x, d) == 1 ? x : tsh_slice(x, d, first, n);
}

/* Positions [first, first + n) of row b alone. */
static tsh_tensor *alone_of(const job *j, const inputs *x, int b, int64_t first, int64_t n) {
    tsh_attention_desc desc = options_of(j);
    tsh_tensor *in[3];
    for (int i = 0; i < 3; i++) in[i] = part_of(part_of(x->all[i], 0, b, 1), 2, first, n);
    if (x->all[3])
        desc.mask = part_of(part_of(part_of(x->all[3], 0, b, 1), 2, first, n), 3, first, n);
    desc.sinks = x->all[4];
    return tsh_attention(in[0], in[1], in[2], &desc);
}

static tsh_tensor *loss_of(tsh_tensor *y, tsh_tensor *by) {
    return tsh_sum(tsh_mul(tsh_cast(y, TSH_REAL), by), TSH_ALL, 0);
}

/* Outputs and gradients of the packed rows are those of each sequence alone; of padding, 0. */
static int alone_rank(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    /* of 16 bits, outputs are below 4, and gradients below 16, with sums over ranks */
    const double room = j->dtype == TSH_BF16 ? 1.0 / 16 : near_by;
    inputs x = inputs_of(ctx, j);
    tsh_tensor *y, *got[5], *loss = NULL;
    for (int again = 0; again < 2; again++) { /* again: memory of the step before is reused */
        y = packed_of(ctx, j, &x);
        CHECK_OK();
        tsh_backward(ctx, loss_of(y, x.by));
        for (int i = 0; i < x.count; i++) {
            got[i] = tsh_keep(tsh_clone(tsh_grad(x.all[i])));
            tsh_zero_grad(x.all[i]);
        }
        y = tsh_keep(packed_of(ctx, j, &x));
        loss = tsh_zeros(ctx, tsh_shape0());
        for (int b = 0; b < B; b++)
            for (int64_t first = 0, r = 0; first < T; first += j->packed->row[b][r++].n) {
                const run own = j->packed->row[b][r];
                tsh_tensor *part = tsh_slice(tsh_slice(y, 0, b, 1), 2, first, own.n), *want;
                tsh_tensor *by = tsh_slice(tsh_slice(x.by, 0, b, 1), 2, first, own.n);
                if (own.id < 0) {
                    CHECK(tsh_item(ctx, tsh_sum(tsh_abs(part), TSH_ALL, 0)) <= 0, "padding");
                    continue;
                }
                want = alone_of(j, &x, b, first, own.n);
                CHECK(apart(ctx, part, want) <= room, "row %d, run %d: off by %g", b, (int)r,
                      apart(ctx, part, want));
                loss = tsh_add(loss, loss_of(want, by));
            }
        tsh_backward(ctx, loss);
        for (int i = 0; i < x.count; i++) {
            const double gap = apart(ctx, got[i], tsh_grad(x.all[i]));
            CHECK(gap <= 40 * room, "the gradient of input %d is off by %g", i, gap);
            tsh_tensor_free(got[i]);
            tsh_zero_grad(x.all[i]);
        }
        tsh_tensor_free(y);
        tsh_step_end(ctx);
    }
    inputs_free(&x);
    CHECK_OK();
    return 0;
}

static void a_packed_sequence_gets_what_it_gets_alone(void **state) {
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++)
        for (int option = p ? p : 0; option < (p ? p + 1 : OPTIONS); option++) {
            job j = {&neighbours, TSH_REAL, (option + 2 * p) % 3, option, {NULL}};
            ranks_run(ranks_degrees[p], alone_rank, &j);
            j.dtype = TSH_BF16;
            if (option < 3) ranks_run(ranks_degrees[p], alone_rank, &j);
        }
}

/* Segments equal the mask that says the same, where their positions do not follow each other. */
static int mask_rank(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const double room = j->dtype == TSH_BF16 ? 1.0 / 16 : near_by;
    inputs x = inputs_of(ctx, j);
    tsh_attention_desc desc = options_of(j);
    tsh_tensor *y[2], *got[3];
    for (int c = 0; c < 2; c++) {
        desc.mask = mask_of(ctx, j->packed);
        y[c] = c ? tsh_attention(x.all[0], x.all[1], x.all[2], &desc) : packed_of(ctx, j, &x);
        tsh_backward(ctx, loss_of(tsh_retain_grad(y[c]), x.by));
        CHECK_OK();
        for (int i = 0; i < 3; i++) {
            CHECK(!c || apart(ctx, got[i], tsh_grad(x.all[i])) <= 40 * room,
                  "the gradient of input %d is off by %g", i,
                  apart(ctx, got[i], tsh_grad(x.all[i])));
            got[i] = tsh_keep(tsh_clone(tsh_grad(x.all[i])));
            tsh_zero_grad(x.all[i]);
        }
    }
    CHECK(apart(ctx, y[0], y[1]) <= room, "off by %g", apart(ctx, y[0], y[1]));
    CHECK_OK();
    return 0;
}

static void scattered_segments_equal_their_mask(void **state) {
    (void)state;
    for (int p = 0; p < COUNT(ranks_degrees); p++)
        for (int option = p % 3; option < (p ? p % 3 + 1 : 3); option++)
            for (int c = 0; c < 2 - (p > 0); c++) {
                job j = {c ? &neighbours : &scattered, TSH_REAL, (option + p) % 3, option, {NULL}};
                ranks_run(ranks_degrees[p], mask_rank, &j);
                j.dtype = TSH_BF16;
                ranks_run(ranks_degrees[p], mask_rank, &j);
            }
}

/* The bits of the output and of all gradients; those of before, if there are any. */
static int bits_rank(tsh_ctx *ctx, void *user) {
    job *j = (job *)user;
    inputs x = inputs_of(ctx, j);
    tsh_tensor *y = tsh_retain_grad(packed_of(ctx, j, &x));
    tsh_backward(ctx, loss_of(y, x.by));
    for (int i = 0; i < 4; i++) {
        tsh_tensor *t = i < 3 ? tsh_grad(x.all[i]) : y;
        double *got = ranks_values(ctx, t);
        CHECK(got, "result %d", i);
        if (tsh_world(ctx)->size == 1 && !j->kept[i]) j->kept[i] = ranks_values(ctx, t);
        CHECK(memcmp(got, j->kept[i], (size_t)tsh_numel(t) * sizeof *got) == 0,
              "result %d has other bits", i);
        free(got);
    }
    CHECK_OK();
    return 0;
}

static void bits_depend_neither_on_ranks_nor_on_threads(void **state) {
    (void)state;
    for (int c = 0; c < 4; c++) {
        job j = {c % 2 ? &scattered : &neighbours, c < 2 ? TSH_REAL : TSH_BF16, 0, 1, {NULL}};
        for (int threads = 1; threads <= 3; threads++) {
            const tsh_desc desc = {.threads = threads, .seed = 5};
            ranks_run_at(RANKS_EACH, 1, &desc, bits_rank, &j);
        }
        for (int p = 1; p < COUNT(ranks_degrees); p++) {
            const tsh_desc desc = {.seed = 5};
            j.layout = p % 2 ? 2 : 0;
            /* in bf16 ranks send gradients in bf16 */
            if (j.dtype == TSH_REAL) ranks_run_with(ranks_degrees[p], &desc, bits_rank, &j);
        }
        for (int i = 0; i < 5; i++) free(j.kept[i]);
    }
}

/* One segment for all is no segment: the same bits, with dropout, too. */
static int single_rank(tsh_ctx *ctx, void *user) {
    double **kept = (double **)user;
    tsh_attention_desc desc = {.causal = 1, .dropout = 0.5};
    tsh_tensor *x[3], *y;
    for (int i = 0; i < 3; i++)
        x[i] = tsh_requires_grad(tsh_keep(tsh_randn(ctx, tsh_shape4(B, H, T, D))), 1);
    if (*kept) desc.segments = tsh_cast(tsh_zeros(ctx, tsh_shape2(B, T)), TSH_I32);
    y = tsh_attention(x[0], x[1], x[2], &desc);
    tsh_backward(ctx, tsh_sum(tsh_mul(y, y), TSH_ALL, 0));
    for (int i = 0; i < 3; i++) {
        double *got = ranks_values(ctx, tsh_grad(x[i]));
        CHECK(got, "gradient %d", i);
        if (!desc.segments) kept[i] = got;
        CHECK(memcmp(got, kept[i], (size_t)tsh_numel(x[i]) * sizeof *got) == 0, "gradient %d", i);
        if (desc.segments) free(got);
    }
    CHECK_OK();
    return 0;
}

static void one_segment_changes_no_bits(void **state) {
    double *kept[3] = {NULL};
    (void)state;
    for (int again = 0; again < 2; again++) ranks_run_at(RANKS_EACH, 1, NULL, single_rank, kept);
    for (int i = 0; i < 3; i++) free(kept[i]);
}

/* ------------------------------------------------------------------ finite differences */

static tsh_tensor *checked(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    const tsh_attention_desc *desc = (const tsh_attention_desc *)user;
    tsh_tensor *y = tsh_attention(in[0], in[1], in[2], desc);
    (void)ctx, (void)n;
    return tsh_sum(tsh_mul(y, tsh_sin(tsh_scale(y, 3))), TSH_ALL, 0);
}

static int difference_rank(tsh_ctx *ctx, void *user) {
    static const int32_t ids[][14] = {{0, 0, 0, 1, 1, 2, -1, 3, 3, 3, 3, 3, -1, -1},
                                      {0, 1, 0, 1, 2, 2, -1, 4, -1, 4, 4, 3, 3, 3}};
    (void)user;
    for (int c = 0; c < 4; c++) {
        tsh_attention_desc desc = {.causal = c / 2};
        tsh_tensor *x[3];
        double worst;
        for (int i = 0; i < 3; i++)
            x[i] = tsh_requires_grad(
                tsh_keep(tsh_scale(tsh_randn(ctx, tsh_shape4(2, i ? 1 : 2, 7, 3)), 0.5)), 1);
        desc.segments = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(2, 7), tsh_replicated(),
                                        ids[c % 2]);
        worst = tsh_gradcheck(ctx, checked, x, 3, &desc, 0, 0);
        CHECK(worst >= 0 && worst < (sizeof(tsh_real) == 4 ? 2e-2 : 1e-7), "case %d: %g", c, worst);
        tsh_tensor_free(desc.segments);
        for (int i = 0; i < 3; i++) tsh_tensor_free(x[i]);
    }
    CHECK_OK();
    return 0;
}

static void gradients_equal_finite_differences(void **state) {
    (void)state;
    ranks_run(1, difference_rank, NULL);
}

/* ------------------------------------------------------------------ what is refused */

static int refused_rank(tsh_ctx *ctx, void *user) {
    static const int64_t lengths[2] = {3, 3};
    tsh_tensor *x = tsh_keep(tsh_ones(ctx, tsh_shape4(2, 2, 3, 4))), *cache[2];
    tsh_tensor *ids = tsh_cast(tsh_zeros(ctx, tsh_shape2(2, 3)), TSH_I32);
    tsh_attention_desc desc = {.lengths = lengths};
    (void)user;
    desc.segments = ids;
    CHECK(!tsh_attention(x, x, x, &desc), "lengths");
    CHECK_SAYS(TSH_ERR_STATE, "segments with lengths");
    desc.lengths = NULL;
    for (int i = 0; i < 2; i++)
        cache[i] = tsh_tensor_new(ctx, TSH_REAL, tsh_shape4(2, 2, 9, 4), tsh_replicated());
    desc.cache_k = cache[0];
    desc.cache_v = cache[1];
    CHECK(!tsh_attention(x, x, x, &desc), "a cache");
    CHECK_SAYS(TSH_ERR_STATE, "segments with a cache");
    desc.cache_k = desc.cache_v = NULL;
    CHECK(!tsh_attention(tsh_slice(x, 2, 0, 2), x, x, &desc), "fewer queries");
    CHECK_SAYS(TSH_ERR_SHAPE, "segments i32 (2, 3) R for 2 rows of 2 queries and 3 keys");
    desc.segments = tsh_zeros(ctx, tsh_shape2(2, 3));
    CHECK(!tsh_attention(x, x, x, &desc), "floating");
    CHECK_SAYS(TSH_ERR_SHAPE, "takes i32");
    desc.segments = tsh_slice(ids, 0, 0, 1);
    CHECK(!tsh_attention(x, x, x, &desc), "a row for all");
    CHECK_SAYS(TSH_ERR_SHAPE, "(1, 3)");
    desc.segments = tsh_redistribute(ids, tsh_sharded(0));
    CHECK(!tsh_attention(x, x, x, &desc), "sharded, but not q");
    CHECK_SAYS(TSH_ERR_LAYOUT, "must be replicated, or sharded as the batch of q");
    desc.segments = ids;
    tsh_step_end(ctx);
    CHECK(!tsh_attention(x, x, x, &desc), "released");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_STALE, "stale");
    tsh_clear_error(ctx);
    return 0;
}

static void what_does_not_fit_is_refused(void **state) {
    (void)state;
    ranks_run(2, refused_rank, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_packed_sequence_gets_what_it_gets_alone),
        cmocka_unit_test(scattered_segments_equal_their_mask),
        cmocka_unit_test(bits_depend_neither_on_ranks_nor_on_threads),
        cmocka_unit_test(one_segment_changes_no_bits),
        cmocka_unit_test(gradients_equal_finite_differences),
        cmocka_unit_test(what_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
